"""Find the GPU kernel of each launch of a program: the cards' side of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata_nb.formats import CACHE_TYPES, TensorType
from strata_nb.kernels.gpu.activations import quantise_kernel
from strata_nb.kernels.gpu.attention import attention_kernel
from strata_nb.kernels.gpu.attention_halves import halves_attention_kernel, takes
from strata_nb.kernels.gpu.embedding import embed_kernel
from strata_nb.kernels.gpu.gating import gated_add_kernel, silu_mul_kernel
from strata_nb.kernels.gpu.linear import linear_kernel
from strata_nb.kernels.gpu.normalising import rms_norm_kernel
from strata_nb.kernels.gpu.operations import Arguments, GpuKernel
from strata_nb.kernels.gpu.rotation import kv_append_kernel, rope_kernel
from strata_nb.kernels.gpu.sampling import sample_kernel
from strata_nb.kernels.program import Launch
from strata_nb.kernels.table import KERNELS

Find = Callable[[Any, Arguments], GpuKernel]

# What returns the function of a kernel of the table for a variant and arguments. Those of routing
# and experts are missing: a card has its own in their place (`routed.py`).
_FUNCTIONS: dict[str, Find] = {
    "embed": lambda kind, _: embed_kernel(kind),
    "rms_norm": lambda _, given: rms_norm_kernel(given["width"]),
    "quantise": lambda _, __: quantise_kernel(),
    "linear": lambda kind, given: linear_kernel(kind, given["values"]),
    "rope": lambda _, __: rope_kernel(),
    "kv_append": lambda pair, given: kv_append_kernel(
        *pair, given["key_length"], given["value_length"]
    ),
    "attention": lambda pair, given: _attention(
        pair,
        (given["key_length"], given["value_length"]),
        given["heads"] // given["kv_heads"],
    ),
    "silu_mul": lambda _, __: silu_mul_kernel(),
    "gated_add": lambda _, __: gated_add_kernel(),
    "sample": lambda _, given: sample_kernel(given["vocabulary"]),
}


def _attention(pair: tuple[str, str], lengths: tuple[int, int], group: int) -> GpuKernel:
    if takes(*pair, *lengths):
        return halves_attention_kernel(*lengths, group)
    return attention_kernel(*pair, *lengths, group)


def gpu_kernel(launch: Launch) -> GpuKernel:
    """Return what runs a launch; ValueError for an unknown variant."""
    axis, variant = KERNELS[launch.kernel].axis, launch.variant
    expected = {
        None: variant is None,
        "weights": isinstance(variant, TensorType),
        "gate_up": all(isinstance(one, TensorType) for one in _pair(variant)),
        "keys_values": all(one in CACHE_TYPES for one in _pair(variant)),
    }
    if not expected[axis]:
        raise ValueError(f"{launch.kernel} {launch.label}: no variant {variant!r} of {axis}")
    return _FUNCTIONS[launch.kernel](variant, arguments_of(launch))


def _pair(variant: Any) -> tuple[Any, Any]:
    """Return a variant that is a pair, and two of nothing for one that is none."""
    return variant if isinstance(variant, tuple) and len(variant) == 2 else (None, None)


def arguments_of(launch: Launch) -> dict[str, int]:
    """Return a launch's arguments by the table's names."""
    names = [argument.name for argument in KERNELS[launch.kernel].arguments]
    return dict(zip(names, launch.arguments, strict=True))


def argument_kinds(launch: Launch) -> list[str]:
    """Return the kinds of a launch's arguments: address, integer or float."""
    return [argument.kind for argument in KERNELS[launch.kernel].arguments]
