"""Find the GPU kernel of each launch of a program: the cards' side of the table."""

from __future__ import annotations

from collections.abc import Callable

from strata_nb.formats import CACHE_TYPES, TensorType
from strata_nb.kernels.gpu import attention, rotation
from strata_nb.kernels.gpu.activations import quantise_kernel
from strata_nb.kernels.gpu.embedding import embed_kernel
from strata_nb.kernels.gpu.experts import expert_down_kernel, expert_gate_up_kernel
from strata_nb.kernels.gpu.gating import gated_add_kernel, silu_mul_kernel
from strata_nb.kernels.gpu.linear import linear_kernel
from strata_nb.kernels.gpu.normalising import rms_norm_kernel
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.gpu.routing import expert_group_kernel, router_top_k_kernel
from strata_nb.kernels.program import Launch
from strata_nb.kernels.table import KERNELS


def _weights(launch: Launch) -> TensorType:
    if not isinstance(launch.variant, TensorType):
        raise ValueError(f"{launch.label}: {launch.variant!r} is no type of weights")
    return launch.variant


def _gate_up(launch: Launch) -> tuple[TensorType, TensorType]:
    match launch.variant:
        case (TensorType() as gate, TensorType() as up):
            return gate, up
    raise ValueError(f"{launch.label}: {launch.variant!r} is no pair of types of weights")


def _pair(launch: Launch) -> tuple[str, str]:
    """Return the types of keys and values."""
    pair = launch.variant
    if not isinstance(pair, tuple) or len(pair) != 2 or not set(pair) <= set(CACHE_TYPES):
        raise ValueError(f"{launch.label}: {pair!r} is no pair of types of a K/V cache")
    keys, values = pair
    return str(keys), str(values)


def _kv_append(launch: Launch) -> GpuKernel:
    given = arguments_of(launch)
    return rotation.kv_append_kernel(*_pair(launch), given["key_length"], given["value_length"])


def _attention(launch: Launch) -> GpuKernel:
    given = arguments_of(launch)
    group = given["heads"] // given["kv_heads"]
    lengths = given["key_length"], given["value_length"]
    return attention.attention_kernel(*_pair(launch), *lengths, group)


def _router_top_k(launch: Launch) -> GpuKernel:
    given = arguments_of(launch)
    return router_top_k_kernel(given["experts"], given["top_k"])


# Each kernel of the table: what returns its function for a launch; None where a card has nothing to
# do, because another kernel reads rows where they are.
_FUNCTIONS: dict[str, Callable[[Launch], GpuKernel] | None] = {
    "embed": lambda launch: embed_kernel(_weights(launch)),
    "rms_norm": lambda launch: rms_norm_kernel(arguments_of(launch)["width"]),
    "quantise": lambda _: quantise_kernel(),
    "linear": lambda launch: linear_kernel(_weights(launch), arguments_of(launch)["values"]),
    "rope": lambda _: rotation.rope_kernel(),
    "kv_append": _kv_append,
    "attention": _attention,
    "silu_mul": lambda _: silu_mul_kernel(),
    "router_top_k": _router_top_k,
    "expert_group": lambda _: expert_group_kernel(),
    "expert_gather": None,
    "expert_gate_up": lambda launch: expert_gate_up_kernel(
        *_gate_up(launch), arguments_of(launch)["values"]
    ),
    "expert_down": lambda launch: expert_down_kernel(
        _weights(launch), arguments_of(launch)["values"]
    ),
    "gated_add": lambda _: gated_add_kernel(),
}


def gpu_kernel(launch: Launch) -> GpuKernel | None:
    """Return what runs a launch, None if nothing has to; ValueError for an unknown variant."""
    find = _FUNCTIONS[launch.kernel]
    return None if find is None else find(launch)


def arguments_of(launch: Launch) -> dict[str, int]:
    """Return a launch's arguments by the table's names."""
    names = [argument.name for argument in KERNELS[launch.kernel].arguments]
    return dict(zip(names, launch.arguments, strict=True))


def argument_kinds(launch: Launch) -> list[str]:
    """Return the kinds of a launch's arguments: address, integer or float."""
    return [argument.kind for argument in KERNELS[launch.kernel].arguments]
