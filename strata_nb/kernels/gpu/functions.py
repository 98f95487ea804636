"""Find the GPU kernel of each launch of a program: the cards' side of the table."""

from __future__ import annotations

from collections.abc import Callable

from strata_nb.formats import TensorType
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

# Each kernel of the table: what returns its function for a launch; None where a card has nothing to
# do, because another kernel reads rows where they are.
_FUNCTIONS: dict[str, Callable[[Launch], GpuKernel] | None] = {
    "rms_norm": lambda launch: rms_norm_kernel(arguments_of(launch)["width"]),
    "quantise": lambda _: quantise_kernel(),
    "silu_mul": lambda _: silu_mul_kernel(),
    "gated_add": lambda _: gated_add_kernel(),
    "router_top_k": lambda launch: _router(arguments_of(launch)),
    "expert_group": lambda _: expert_group_kernel(),
    "expert_gather": None,
    "expert_gate_up": lambda launch: expert_gate_up_kernel(
        *_gate_up(launch), arguments_of(launch)["values"]
    ),
    "expert_down": lambda launch: expert_down_kernel(
        _weights(launch), arguments_of(launch)["values"]
    ),
    "embed": lambda launch: embed_kernel(_weights(launch)),
    "linear": lambda launch: linear_kernel(_weights(launch), arguments_of(launch)["values"]),
}


def _weights(launch: Launch) -> TensorType:
    if not isinstance(launch.variant, TensorType):
        raise ValueError(f"{launch.label}: {launch.variant!r} is no type of weights")
    return launch.variant


def _gate_up(launch: Launch) -> tuple[TensorType, TensorType]:
    match launch.variant:
        case (TensorType() as gate, TensorType() as up):
            return gate, up
    raise ValueError(f"{launch.label}: {launch.variant!r} is no pair of types of weights")


def gpu_kernel(launch: Launch) -> GpuKernel | None:
    """Return what runs a launch, None if nothing has to; ValueError for an unknown variant."""
    find = _FUNCTIONS[launch.kernel]
    return None if find is None else find(launch)


def _router(arguments: dict[str, int]) -> GpuKernel:
    return router_top_k_kernel(arguments["experts"], arguments["top_k"])


def arguments_of(launch: Launch) -> dict[str, int]:
    """Return a launch's arguments by the table's names."""
    names = [argument.name for argument in KERNELS[launch.kernel].arguments]
    return dict(zip(names, launch.arguments, strict=True))


def argument_kinds(launch: Launch) -> list[str]:
    """Return the kinds of a launch's arguments: address, integer or float."""
    return [argument.kind for argument in KERNELS[launch.kernel].arguments]
