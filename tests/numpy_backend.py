"""A backend that runs programs in numpy: each launch by the reference of its kernel.

It is slow and exact. A program that gives the judge's logits here is right, whatever a faster
backend makes of it. Its "quantised" rows are the float32 rows themselves, because their form is a
backend's own affair: nothing is lost, and still each product has to be given the form that it
reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import kernel_references as plain
import numpy as np
from kernel_references import REFERENCES
from numpy.typing import NDArray

from strata_nb.addresses import memory_view
from strata_nb.cache.kv_layout import BLOCK_CELLS, HeadPlane
from strata_nb.formats import TensorType, dequantise, tensor_bytes
from strata_nb.host import HostDriver, parse_host_devices
from strata_nb.kernels.program import Launch, Program
from strata_nb.kernels.reference import Floats, Integers, RopeStyle, dequantise_kv
from strata_nb.kernels.table import KERNELS
from strata_nb.packing import PACKED, unpack
from strata_nb.shared_tables import SharedTable


class NumpyBackend:
    """Run programs on the host's memory, one launch after the other."""

    device, has_slots, threads = 0, False, 1
    of_host, most_rows, outside_bytes, reserve_bytes = True, None, 0, 0
    batches_apart, gathers_rows = False, True
    chooses_tokens = fills = pools = attends_in_runs = False
    warnings: Sequence[str] = ()

    def __init__(self, device: str = "host") -> None:
        self.name = device
        self.has_slots = device != "host"
        self.driver = HostDriver(parse_host_devices(device))

    bytes_beside = 0

    def packed_row_bytes(self, values: int) -> int:
        return 4 * values

    def compile(self, programs: Sequence[Program], progress: Any, say: Any, **_: Any) -> None:
        pass

    def prepare(self, programs: Sequence[Program]) -> Any:
        return list(programs)

    def share(self, table: SharedTable, *, is_written: bool = False) -> int:
        return int(table.array.ctypes.data)

    def send(self, address: int, array: NDArray[Any]) -> None:
        memory_view(address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)

    def fetch(self, address: int, array: NDArray[Any]) -> None:
        array.reshape(-1).view(np.uint8)[:] = memory_view(address, array.nbytes)

    def wait(self) -> None:
        pass

    def flights(self, sent_bytes: int, fetched_bytes: int) -> None:
        pass

    def run(self, program: Any, rows: int, first: int = 0, last: int | None = None) -> None:
        for one in cast("Program", program)[first:last]:
            _RUN[one.kernel](_Arguments(one))

    def close(self) -> None:
        self.driver.close()


class _Arguments:
    """See what the arguments of a launch stand for: numbers, and arrays in memory."""

    def __init__(self, one: Launch) -> None:
        described = KERNELS[one.kernel].arguments
        self.function: Callable[..., Any] = REFERENCES[one.kernel]
        self.variant: Any = one.variant
        self._words = {
            argument.name: word for argument, word in zip(described, one.arguments, strict=True)
        }
        self.rows = int(self.integers("rows", 1)[0])

    def __getitem__(self, name: str) -> int:
        return self._words[name]

    def real(self, name: str) -> float:
        return float(np.array(self[name], np.uint32).view(np.float32))

    def array(self, name: str, kind: Any, *shape: int) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        return memory_view(self[name], size).view(kind).reshape(shape)

    def floats(self, name: str, *shape: int) -> Floats:
        return self.array(name, np.float32, *shape)

    def integers(self, name: str, *shape: int) -> Integers:
        return self.array(name, np.int64, *shape)

    def write(self, result: Floats) -> None:
        """Write rows to `out` and `packed`, to those that are wanted."""
        for name in ("out", "packed"):
            if self[name]:
                self.floats(name, *result.shape)[:] = result

    def raw_weight(self, address: int, kind: TensorType, outputs: int, values: int) -> Any:
        """Return a matrix as the file has it."""
        data = memory_view(address, tensor_bytes(kind, (outputs, values)))
        return unpack(kind, data, outputs, values) if kind in PACKED else data

    def weight(self, address: int, kind: TensorType, outputs: int, values: int) -> Floats:
        raw = self.raw_weight(address, kind, outputs, values)
        return dequantise(kind, raw).reshape(outputs, values)

    def experts(self, offset: str, kind: TensorType) -> Floats:
        """Return a matrix of all experts: (experts, outputs, values)."""
        blobs = self.integers("addresses", self["experts"])
        sizes = self["outputs"], self["values"]
        return np.stack([self.weight(int(blob) + self[offset], kind, *sizes) for blob in blobs])

    @property
    def style(self) -> RopeStyle:
        return "halves" if self["halves"] else "pairs"

    @property
    def rope(self) -> tuple[Integers, Floats, RopeStyle]:
        """Return the rows' positions, the table of angles, and how planes lie."""
        positions = self.integers("positions", self.rows)
        table = self.floats("table", int(positions.max()) + 1, 2, self["planes"])
        return positions, table, self.style

    def plane(self, sequence: int, cell: int, part: str, head: int) -> list[NDArray[Any]]:
        """Return a head's part of the block of a cell: values (64, length), and scales."""
        table = self.integers("blocks", sequence + 1, self["table_width"])
        length = self["key_length" if part == "k" else "value_length"]
        plane = HeadPlane(self.variant[part == "v"], length)
        address = int(table[sequence, cell // BLOCK_CELLS]) + self[f"{part}_offset"]
        address += head * plane.size_bytes
        values = memory_view(address, plane.scales_offset).view(plane.value_type)
        found = [values.reshape(BLOCK_CELLS, length)]
        if plane.groups:
            size = plane.size_bytes - plane.scales_offset
            scales = memory_view(address + plane.scales_offset, size).view(plane.scale_type)
            found.append(scales.reshape(BLOCK_CELLS, plane.groups))
        return found


def _embed(a: _Arguments) -> None:
    raw = a.raw_weight(a["weight"], a.variant, a["vocabulary"], a["width"])
    tokens = a.integers("tokens", a.rows)
    assert tokens.min() >= 0
    a.floats("x", a.rows, a["width"])[:] = a.function(a.variant, raw, tokens, a["width"])


def _rms_norm(a: _Arguments) -> None:
    index = a.integers("index", a.rows) if a["index"] else np.arange(a.rows)
    x = a.floats("x", int(index.max()) + 1, a["parts"] * a["width"])[index]
    a.write(a.function(x, a.floats("weight", a["width"]), a.real("eps"), a["parts"]))


def _quantise(a: _Arguments) -> None:
    shape = a.rows * a["times"], a["values"]
    a.floats("packed", *shape)[:] = a.floats("x", *shape)


def _linear(a: _Arguments) -> None:
    x, y = a.floats("x", a.rows, a["values"]), a.floats("y", a.rows, a["outputs"])
    weight = a.weight(a["weight"], a.variant, a["outputs"], a["values"])
    bias = a.floats("bias", a["outputs"]) if a["bias"] else None
    y[:] = a.function(x, weight, bias, y if a["add"] else None)


def _rope(a: _Arguments) -> None:
    x = a.floats("x", a.rows, a["heads"], a["length"])
    x[:] = a.function(x, *a.rope)


def _kv_append(a: _Arguments) -> None:
    k = a.floats("k", a.rows, a["heads"], a["key_length"])
    v = a.floats("v", a.rows, a["heads"], a["value_length"])
    keys = a.function(k, *a.rope, a.variant[0])
    places = zip(a.integers("sequences", a.rows), a.integers("positions", a.rows), strict=True)
    for row, (sequence, cell) in enumerate(places):
        for head in range(a["heads"]):
            for part, what in (("k", keys), ("v", plain.stored(v, a.variant[1]))):
                for plane, stored in zip(a.plane(sequence, cell, part, head), what, strict=True):
                    plane[cell % BLOCK_CELLS] = stored[row, head]


def _attention(a: _Arguments) -> None:
    positions, sequences = a.integers("positions", a.rows), a.integers("sequences", a.rows)
    q = a.floats("q", a.rows, a["heads"], a["key_length"])
    out = a.floats("out", a.rows, a["heads"], a["value_length"])
    for row in range(a.rows):
        cells = int(positions[row]) + 1
        read: list[Floats] = []
        for part in "kv":
            heads = []
            for head in range(a["kv_heads"]):
                planes = [
                    a.plane(sequences[row], cell, part, head)
                    for cell in range(0, cells, BLOCK_CELLS)
                ]
                stored = [np.concatenate(some)[:cells] for some in zip(*planes, strict=True)]
                back = dequantise_kv(*stored) if len(stored) > 1 else stored[0].astype(np.float32)
                heads.append(back)
            read.append(np.stack(heads))
        here = slice(row, row + 1)
        out[here] = a.function(q[here], *read, positions[here], a.real("scale"))


def _silu_mul(a: _Arguments) -> None:
    shape = a.rows, a["values"]
    a.write(a.function(a.floats("gate", *shape), a.floats("up", *shape)))


def _router_top_k(a: _Arguments) -> None:
    shape, top_k = (a.rows, a["top_k"]), a["top_k"]
    logits = a.floats("logits", a.rows, a["experts"])
    forced = None
    if a["forced"]:
        positions = a.integers("positions", a.rows)
        forced = a.array("forced", np.int16, positions.max() + 1, top_k)[positions]
    chosen, shares = a.function(logits, top_k, renormalise=bool(a["renormalise"]), forced=forced)
    a.integers("chosen", *shape)[:], a.floats("shares", *shape)[:] = chosen, shares


def _expert_group(a: _Arguments) -> None:
    experts, choices = a["experts"], a.rows * a["top_k"]
    starts, members, places = a.function(a.integers("chosen", a.rows, a["top_k"]), experts)
    a.integers("starts", experts + 1)[:] = starts
    a.integers("members", choices)[:] = members
    a.integers("places", choices)[:] = places
    counts, hit = np.diff(starts), a.array("tier", np.uint8, experts) == 0
    a.integers("use", experts)[:] += counts
    a.integers("tally", 2)[:] += [counts[hit].sum(), counts[~hit].sum()]


def _expert_gather(a: _Arguments) -> None:
    members = a.integers("members", a.rows * a["top_k"])
    x = a.array("x", np.uint8, a.rows, a["row_bytes"])
    gathered = a.array("gathered", np.uint8, len(members), a["row_bytes"])
    gathered[:] = a.function(x, members, a["top_k"])


def _expert_gate_up(a: _Arguments) -> None:
    starts, choices = a.integers("starts", a["experts"] + 1), a.rows * a["top_k"]
    gate, up = a.experts("gate_offset", a.variant[0]), a.experts("up_offset", a.variant[1])
    inner = a.function(a.floats("gathered", choices, a["values"]), starts, gate, up)
    for name in ("inner", "packed"):
        if a[name]:
            a.floats(name, choices, a["outputs"])[:] = inner


def _expert_down(a: _Arguments) -> None:
    starts, choices = a.integers("starts", a["experts"] + 1), a.rows * a["top_k"]
    inner, places = a.floats("inner", choices, a["values"]), a.integers("places", choices)
    shares, y = a.floats("shares", a.rows, a["top_k"]), a.floats("y", a.rows, a["outputs"])
    y[:] = a.function(inner, starts, places, shares, a.experts("down_offset", a.variant), y)


def _gated_add(a: _Arguments) -> None:
    shape = a.rows, a["width"]
    y = a.floats("y", *shape)
    y[:] = a.function(a.floats("gate", a.rows, 1), a.floats("x", *shape), y)


_RUN: dict[str, Callable[[_Arguments], None]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "quantise": _quantise,
    "linear": _linear,
    "rope": _rope,
    "kv_append": _kv_append,
    "attention": _attention,
    "silu_mul": _silu_mul,
    "router_top_k": _router_top_k,
    "expert_group": _expert_group,
    "expert_gather": _expert_gather,
    "expert_gate_up": _expert_gate_up,
    "expert_down": _expert_down,
    "gated_add": _gated_add,
}
