"""Find the compiled function of each launch of a program: the host's side of the table.

Only what a program launches is compiled, or read from the cache of compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from strata_nb.formats import TensorType
from strata_nb.kernels.host import (
    activations,
    attention,
    embedding,
    experts,
    gating,
    linear,
    matrices,
    normalising,
    rotation,
    routing,
)
from strata_nb.kernels.host.operations import HostKernel, Work
from strata_nb.kernels.host.threads import PreparedProgram
from strata_nb.kernels.program import Launch, Program
from strata_nb.kernels.table import KERNELS


class _Found(NamedTuple):
    """Say how the function of a launch is made, and how much work space a thread needs for it."""

    make: Callable[[Launch, Work], HostKernel]
    work_bytes: Callable[[Launch], int] = lambda _: 0


def _argument(launch: Launch, name: str) -> int:
    names = [argument.name for argument in KERNELS[launch.kernel].arguments]
    return launch.arguments[names.index(name)]


def _weights(launch: Launch) -> TensorType:
    if not isinstance(launch.variant, TensorType):
        raise ValueError(f"{launch.label}: {launch.variant!r} is no type of weights")
    return launch.variant


def _pair(launch: Launch) -> tuple[Any, Any]:
    if not isinstance(launch.variant, tuple) or len(launch.variant) != 2:
        raise ValueError(f"{launch.label}: {launch.variant!r} is no pair of types")
    return launch.variant


def _matrix_work(launch: Launch) -> int:
    return matrices.work_bytes(_weights(launch), _argument(launch, "values"))


_FUNCTIONS: dict[str, _Found] = {
    "embed": _Found(
        lambda launch, work: embedding.embed_kernel(_weights(launch), work),
        lambda launch: embedding.work_bytes(_weights(launch), _argument(launch, "width")),
    ),
    "rms_norm": _Found(lambda _, __: normalising.rms_norm_kernel()),
    "quantise": _Found(lambda _, __: activations.quantise_kernel()),
    "linear": _Found(
        lambda launch, work: linear.linear_kernel(_weights(launch), work), _matrix_work
    ),
    "rope": _Found(lambda _, __: rotation.rope_kernel()),
    "kv_append": _Found(lambda launch, _: rotation.kv_append_kernel(*_pair(launch))),
    "attention": _Found(
        lambda launch, work: attention.attention_kernel(
            *_pair(launch), _argument(launch, "key_length"), _argument(launch, "value_length"), work
        ),
        lambda launch: attention.attention_work_bytes(_argument(launch, "value_length")),
    ),
    "silu_mul": _Found(lambda _, __: gating.silu_mul_kernel()),
    "router_top_k": _Found(lambda _, __: routing.router_top_k_kernel()),
    "expert_group": _Found(lambda _, __: routing.expert_group_kernel()),
    "expert_gather": _Found(lambda _, __: routing.expert_gather_kernel()),
    "expert_gate_up": _Found(
        lambda launch, work: experts.expert_gate_up_kernel(*_pair(launch), work),
        lambda launch: max(
            matrices.work_bytes(kind, _argument(launch, "values")) for kind in _pair(launch)
        ),
    ),
    "expert_down": _Found(
        lambda launch, work: experts.expert_down_kernel(
            _weights(launch), _argument(launch, "values"), work
        ),
        _matrix_work,
    ),
    "gated_add": _Found(lambda _, __: gating.gated_add_kernel()),
}


class WorkSpace:
    """Own the work space of the threads, as large as the most demanding launch needs."""

    def __init__(self, launches: Program, threads: int) -> None:
        stride = max((_FUNCTIONS[one.kernel].work_bytes(one) for one in launches), default=0)
        stride = -(-stride // 64) * 64
        self.size_bytes = threads * stride
        self._memory = np.empty(self.size_bytes + 64, np.uint8)
        address = int(self._memory.ctypes.data)
        self.work = Work(address + -address % 64, stride)


def host_kernel(launch: Launch, work: Work) -> HostKernel:
    """Return what runs a launch; ValueError for a variant that has no function."""
    return _FUNCTIONS[launch.kernel].make(launch, work)


def prepare(program: Program, space: WorkSpace) -> PreparedProgram:
    """Return a program in the form that threads run; `space` must live as long as it does.

    Raises ValueError for a variant that has no function.
    """
    return PreparedProgram(
        [(host_kernel(one, space.work), one.arguments, one.waits) for one in program]
    )
