"""Check the tensors of a file against those that an architecture needs, and add up their sizes.

Every tensor of the file must be one that the forward reads, in the expected shape, and every
tensor that the forward reads must be there: an overlooked bias gives wrong text, not an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from strata_nb.errors import FileFormatError
from strata_nb.formats import DEQUANTISABLE, dequantise
from strata_nb.gguf import GGUFFile, TensorInfo
from strata_nb.models.description import Description

NAMES_SHOWN = 5  # of many tensors that are at fault
EXPERT_PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")

_ONE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")

Shape = tuple[int, ...]


class Expected:
    """List what an architecture reads: names and shapes (numpy's order, slowest first).

    required   must be in the file
    optional   may be in the file
    choices    groups of names of which a file has all or none: a bias in one layer only is a fault
    """

    def __init__(self, model: Description) -> None:
        """Start with what every model has: the embedding, the last norm, and perhaps a head."""
        self.model = model
        self.required: dict[str, Shape] = {
            "token_embd.weight": (model.vocab_size, model.width),
            "output_norm.weight": (model.width,),
        }
        self.optional: dict[str, Shape] = {"output.weight": (model.vocab_size, model.width)}
        self.choices: list[list[str]] = []

    def in_every_layer(self, name: str, *shape: int) -> None:
        """Require blk.N.`name` in all layers."""
        self.required |= {f"blk.{layer}.{name}": shape for layer in range(self.model.layers)}

    def in_every_layer_or_none(self, name: str, *shape: int) -> None:
        """Allow blk.N.`name` in all layers or in none."""
        group = {f"blk.{layer}.{name}": shape for layer in range(self.model.layers)}
        self.optional |= group
        self.choices.append(list(group))

    def attention(self) -> None:
        """Require a norm, four matrices and the next norm in all layers; allow their biases."""
        model = self.model
        self.in_every_layer("attn_norm.weight", model.width)
        self._linear("attn_q", model.heads * model.key_length, model.width)
        self._linear("attn_k", model.kv_heads * model.key_length, model.width)
        self._linear("attn_v", model.kv_heads * model.value_length, model.width)
        self._linear("attn_output", model.width, model.heads * model.value_length)
        self.in_every_layer("ffn_norm.weight", model.width)

    def feed_forward(self) -> None:
        """Require the three matrices of a dense feed-forward in all layers; allow their biases."""
        width, inner = self.model.width, self.model.ff_width
        self._linear("ffn_gate", inner, width)
        self._linear("ffn_up", inner, width)
        self._linear("ffn_down", width, inner)

    def experts(self) -> None:
        """Require a router and three stacks of experts in all layers."""
        count, width, inner = self.model.experts, self.model.width, self.model.expert_width
        self.in_every_layer("ffn_gate_inp.weight", count, width)
        self.in_every_layer("ffn_gate_exps.weight", count, inner, width)
        self.in_every_layer("ffn_up_exps.weight", count, inner, width)
        self.in_every_layer("ffn_down_exps.weight", count, width, inner)

    def _linear(self, name: str, rows: int, columns: int) -> None:
        """Require a matrix in all layers, and allow its bias."""
        self.in_every_layer(f"{name}.weight", rows, columns)
        self.in_every_layer_or_none(f"{name}.bias", rows)


def check_tensors(file: GGUFFile, expected: Expected) -> None:
    """Raise FileFormatError for a tensor that is missing, unknown, misshapen or in another type."""
    known = expected.required | expected.optional
    missing = [name for name in expected.required if name not in file.tensors]
    for group in expected.choices:
        absent = [name for name in group if name not in file.tensors]
        if len(absent) < len(group):
            missing += absent
    unknown = [name for name in file.tensors if name not in known]
    if any(_ONE_EXPERT.fullmatch(name) for name in unknown):
        raise _fault(
            file,
            unknown,
            "not understood: each expert is a tensor of its own",
            "such files are from early 2024: convert the model again, which stacks the experts",
        )
    if missing:
        also = f"; {_list(unknown, 'not understood')}" if unknown else ""
        raise _fault(
            file,
            missing,
            "missing",
            "the file may be incomplete, or of another architecture than it says",
            also,
        )
    if unknown:
        raise _fault(
            file,
            unknown,
            f"not understood in a model of architecture {file.architecture}",
            "running it regardless could give wrong text: use a program that knows these tensors",
        )
    for name, info in file.tensors.items():
        vector = len(known[name]) == 1 and _flat(info.shape) == known[name]
        if info.shape != known[name] and not vector:
            raise FileFormatError(
                file.path,
                info.offset,
                f"{name} has shape {_shape(info.shape)}, wanted {_shape(known[name])} by the "
                "metadata",
                hint="the metadata and the weights are not of one model: convert it again",
            )
    undecodable = [info for info in file.tensors.values() if info.type not in DEQUANTISABLE]
    if undecodable:
        types = ", ".join(sorted({info.type.name for info in undecodable}))
        raise _fault(
            file,
            [info.name for info in undecodable],
            f"of a type that is not supported ({types})",
            "quantise the model to another type",
        )
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        values = dequantise(factors.type, file.raw(factors.name))
        wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if wrong.size:
            raise FileFormatError(
                file.path,
                factors.offset,
                f"rope_freqs.weight: value {wrong[0]} is {values[wrong[0]]}, wanted one above 0",
                hint="the file is damaged, or was converted wrongly: convert it again",
            )


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """Add up the tensors of a file; see the fields of the same names in `Description`."""

    parameters: int
    dense_bytes: int
    embedding_bytes: int
    expert_bytes: int
    one_expert_bytes: tuple[int, ...]

    @classmethod
    def of(cls, file: GGUFFile, experts: int, layers: int) -> Self:
        """Return the sizes; `experts` per layer, 0 in a dense model."""
        tensors = file.tensors
        expert_bytes = sum(info.size_bytes for info in tensors.values() if is_expert(info.name))
        embedding = tensors.get("token_embd.weight")
        total_bytes = sum(info.size_bytes for info in tensors.values())
        one_expert_bytes = tuple(
            sum(
                tensors[name].size_bytes // experts
                for part in EXPERT_PARTS
                if (name := f"blk.{layer}.{part}.weight") in tensors
            )
            for layer in range(layers if experts else 0)
        )
        return cls(
            parameters=sum(values_in(info) for info in tensors.values()),
            dense_bytes=total_bytes - expert_bytes,
            embedding_bytes=embedding.size_bytes if embedding is not None else 0,
            expert_bytes=expert_bytes,
            one_expert_bytes=one_expert_bytes,
        )


def is_expert(name: str) -> bool:
    """Tell whether a tensor is a stack of routed experts."""
    return any(f".{part}." in name for part in EXPERT_PARTS)


def values_in(info: TensorInfo) -> int:
    """Return the number of values of a tensor."""
    return math.prod(info.shape)


def _flat(shape: Shape) -> Shape:
    """Return the shape without leading ones: some writers store a vector as a matrix of one row."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _shape(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "of a single value"


def _fault(
    file: GGUFFile, names: Sequence[str], fault: str, hint: str, also: str = ""
) -> FileFormatError:
    first = file.tensors.get(names[0])
    offset = None if first is None else first.offset
    return FileFormatError(file.path, offset, _list(names, fault) + also, hint=hint)


def _list(names: Sequence[str], fault: str) -> str:
    """Say how many tensors have a fault, and name the first few."""
    verb = "tensor is" if len(names) == 1 else "tensors are"
    more = len(names) - NAMES_SHOWN
    shown = ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"{len(names)} {verb} {fault}: {shown}"
