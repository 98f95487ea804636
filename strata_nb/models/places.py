"""Where everything is that a model's programs read and write: plain data.

Places       weights, K/V, experts: what a program reads
Buffers      hands out the addresses of what a step writes
StepRecord   what changes from step to step
Programs     the result: what a step runs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from strata_nb.formats import TensorType
from strata_nb.kernels.program import Program

ALIGNMENT = 256  # bytes; of every buffer


class PlacedTensor(Protocol):
    """Say where a tensor is: packed as `packing.py` says, vectors as float32."""

    @property
    def address(self) -> int: ...

    @property
    def kind(self) -> TensorType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class ExpertPart(Protocol):
    """Say where a matrix begins in the blob of each expert of a layer, and what it is."""

    @property
    def offset(self) -> int: ...

    @property
    def kind(self) -> TensorType: ...


class ExpertPlaces(NamedTuple):
    """Say where a layer's experts are: addresses of the rows of tables, and the parts of a blob.

    addresses, tier, use   of int64, uint8 and int64 (experts,)
    tally                  of int64 (2,): hits and misses, of all layers
    forced                 of int16 (context, top_k): the experts that each position uses, whatever
                           the router says; 0: what it says
    parts                  by the names of `EXPERT_PARTS`
    homes, seen, plan      of int64 (experts,) twice and a record of `fill_plans.py`, where
                           programs give experts slots; else 0
    """

    addresses: int
    tier: int
    use: int
    tally: int
    forced: int
    parts: Mapping[str, ExpertPart]
    homes: int = 0
    seen: int = 0
    plan: int = 0


class KVPlaces(NamedTuple):
    """Say where the K/V is: the block table, and in a block each layer's keys and values."""

    table: int
    table_width: int
    key_type: str
    value_type: str
    key_offsets: Sequence[int]
    value_offsets: Sequence[int]


class Places(NamedTuple):
    """Say where everything is that a program reads and does not write.

    tensors            by name; those that are not there are not in the model
    experts            of each layer; none in a dense model
    rope_table         float32 (context, 2, planes)
    """

    tensors: Mapping[str, PlacedTensor]
    experts: Sequence[ExpertPlaces]
    kv: KVPlaces
    rope_table: int


class Buffers:
    """Hand out addresses one behind the other; `size_bytes` is what they take together."""

    def __init__(self, base: int = 0) -> None:
        self._base = base
        self.size_bytes = 0

    def take(self, size: int) -> int:
        """Return the address of `size` bytes, a multiple of `ALIGNMENT`."""
        address = self._base + self.size_bytes
        self.size_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        return address


class StepRecord(NamedTuple):
    """Say where a step's own numbers are, all int64; the caller writes them before each run.

    rows, wanted   how many rows, and of how many of them logits are wanted; behind each as many
                   words 0 as `ROWS_WORDS` says
    tokens, sequences, positions   of the rows
    wanted_rows    which rows those are
    """

    rows: int
    wanted: int
    tokens: int
    sequences: int
    positions: int
    wanted_rows: int


class Programs(NamedTuple):
    """Hold what a step runs: `body` once, then `head` for up to `head_rows` wanted rows at a time,
    and after each `head`, where tokens are drawn on the device, `choice`.

    layer_ends   launches of the body up to the end of each layer: where it may be cut
    chosen       for each layer the address of int64 (rows, top_k): the experts that the rows of the
                 last step used. One behind the other
    logits       address of float32 (head rows, vocabulary)
    choices      address of a record (`kernels/choices.py`) for each head row, which the caller
                 writes before `choice`; 0 where there is none. Close behind the step's record
    drawn        address of int64 (head rows,): the tokens that `choice` drew, which `body` reads
                 where the record says so; 0 as well
    """

    body: Program
    head: Program
    choice: Program
    layer_ends: tuple[int, ...]
    record: StepRecord
    chosen: Sequence[int]
    logits: int
    choices: int
    drawn: int
    max_rows: int
    head_rows: int

    @property
    def window(self) -> Program:
        """A whole window, whose rows all have a token drawn for them, as one program."""
        return self.body + self.head + self.choice
