"""Every kernel of cards compiles for old and new targets, within its registers, without a card."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from gpu_launches import shaped

from strata_nb.formats import CACHE_TYPES
from strata_nb.kernels.gpu import compile as gpu_compile
from strata_nb.kernels.gpu.functions import argument_kinds, gpu_kernel
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.table import KERNELS
from strata_nb.packing import PACKED, UNPACKED

TARGETS = ("sm_75", "sm_90", "sm_120")
OTHER_TARGETS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_100", "sm_103", "sm_121")
KINDS = sorted(PACKED | UNPACKED)
LENGTHS = (128, 64, 80, 256)  # of heads, the usual one first
WIDTHS = (64, 1024, 8192)  # of rows: norms have more threads for wider ones
GROUPS = (4, 1, 8)  # heads that share a K/V head
ROUTERS = ((8, 2), (32, 4), (60, 4), (64, 8), (128, 8), (256, 8))


Kernels = dict[str, tuple[GpuKernel, Sequence[str]]]


def every_kernel(*, lengths: bool = False) -> Kernels:
    """Return kernels by name, with the kinds of their arguments: of each kernel of the table every
    type of weights, every pair of types of the K/V, every number of heads and of experts.

    lengths   also every pair of types with every length of heads, not the usual length alone
    """
    found: Kernels = {}
    for name in KERNELS:
        for variant, values in launches_of(name, lengths=lengths):
            one = shaped(name, variant, **values)
            kernel = gpu_kernel(one)
            if kernel is not None:
                found[kernel.name] = kernel, argument_kinds(one)
    return found


def launches_of(name: str, *, lengths: bool) -> Iterator[tuple[object, dict[str, int]]]:
    """Yield a variant and the arguments that decide about code, for each code of a kernel."""
    axis = KERNELS[name].axis
    if name == "embed":
        yield from ((kind, {}) for kind in KINDS)
    elif axis in ("weights", "gate_up"):
        for kind in KINDS:
            for values in (256, 257) if kind in UNPACKED else (256,):
                yield (kind, kind) if axis == "gate_up" else kind, {"values": values}
    elif axis == "keys_values":
        for pair, length, group in product(product(CACHE_TYPES, repeat=2), LENGTHS, GROUPS):
            usual = pair == ("f16", "f16") or length == LENGTHS[0]
            if (usual or lengths) and (group == GROUPS[0] or (name == "attention" and usual)):
                sizes = {"key_length": length, "value_length": length}
                yield pair, sizes | ({"heads": group, "kv_heads": 1} if name == "attention" else {})
    elif name == "rms_norm":
        yield from ((None, {"width": width}) for width in WIDTHS)
    elif name == "router_top_k":
        yield from ((None, {"experts": experts, "top_k": top_k}) for experts, top_k in ROUTERS)
    else:
        yield None, {}


KERNELS_IN_USE = every_kernel()
EVERY_KERNEL = every_kernel(lengths=True)


def check(made_of: tuple[GpuKernel, Sequence[str]], targets: Sequence[str]) -> None:
    """Compile a kernel for targets."""
    kernel, kinds = made_of
    code = gpu_compile.ptx_code(kernel, kinds)
    assert ".f64" not in code  # cards for games compute it 64 times slower
    # Without a mode of rounding the linker may join two of them to one, and quotients are near.
    assert not re.search(r"(add|sub|mul|mad|div)(\.full|\.approx)?(\.ftz)?\.f32", code)
    for target in targets:
        made = gpu_compile.link(code, target)
        assert made.registers <= kernel.registers, target
        assert made.spill_bytes == 0, target


def test_every_kernel_of_the_table_is_among_them() -> None:
    without = [name for name in KERNELS if not any(key.startswith(name) for key in KERNELS_IN_USE)]
    assert without == ["expert_gather"]  # rows are read where they are


@pytest.mark.parametrize("name", sorted(KERNELS_IN_USE))
def test_a_kernel_fits_its_registers_on_every_target(name: str) -> None:
    check(KERNELS_IN_USE[name], TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EVERY_KERNEL))
def test_a_kernel_fits_its_registers_on_the_other_targets_and_for_every_length(name: str) -> None:
    check(EVERY_KERNEL[name], (*TARGETS, *OTHER_TARGETS))
