"""Kernels of cards stay free of what only NVIDIA has: each becomes code for AMD's cards as well.

They are written once and compiled for NVIDIA; whether the other bodies of the intrinsics are right
shows here only as far as a compiler can tell. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import amdgpu_lowering
import pytest
from gpu_launches import OF_CARDS, shaped, shaped_for_card

from strata_nb.formats import CACHE_TYPES, TensorType
from strata_nb.kernels.gpu.attention_batches import batch_attention_kernel
from strata_nb.kernels.gpu.attention_tiles import tiles_attention_kernel
from strata_nb.kernels.gpu.batch_float_tiles import batch_float_tiles_kernel
from strata_nb.kernels.gpu.batch_preparing import batch_prepare_kernel
from strata_nb.kernels.gpu.batches import BATCH_KERNELS
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.compile import llvm_code
from strata_nb.kernels.gpu.intrinsics.memory import SHARED_NAME
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.gpu.preparing import ARGUMENTS as PREPARE
from strata_nb.kernels.gpu.routed import CARD_KERNELS, FUSED
from strata_nb.kernels.gpu.router import with_routers
from strata_nb.kernels.table import KERNELS
from strata_nb.packing import PACKED, UNPACKED

pytestmark = pytest.mark.usefixtures("garbage_later")

T = TensorType
Case = tuple[str, Any]  # a kernel of the table, a variant
CARDS = ["gfx1100", "gfx1201"]  # RDNA 3 and 4
# Products of matrices are made of shuffles here, and these do not fit the registers.
OF_SHUFFLES = (
    *("attention_halves", "attention_tiles", "attention_batch"),
    *("batch_linear", "batch_expert", "batch_up"),
)
WEIGHTS = sorted(PACKED | UNPACKED)
PRODUCTS = ("batch_linear", "batch_expert", "batch_up")

# Sizes of a model of the usual kind, by the table's names.
SIZES = {
    "width": 2048,
    "values": 2048,
    "outputs": 768,
    "parts": 1,
    "times": 1,
    "experts": 128,
    "top_k": 8,
    "heads": 32,
    "kv_heads": 4,
    "length": 128,
    "planes": 64,
    "key_length": 128,
    "value_length": 128,
    "vocabulary": 4096,
}

VARIANTS: dict[str | None, list[Any]] = {
    None: [None],
    "weights": WEIGHTS,
    "packed": sorted(PACKED),
    "keys_values": list(product(CACHE_TYPES, repeat=2)),
    "gate_up": list(product(WEIGHTS, repeat=2)),
    "packed_pairs": [(one, one) for one in sorted(PACKED)],
}

# What every run looks at: each kernel, and for products one type of each way to decode a block.
DECODED = [T.F16, T.Q4_0, T.Q8_0, T.Q4_K, T.Q6_K, T.IQ4_XS, T.IQ3_S, T.IQ1_M, T.MXFP4]
OF_PACKED = ("packed_pairs", "packed")
# The table's kernels that a card has, and those that it has in place of others.
AXES: dict[str, str | None] = {
    **{name: kernel.axis for name, kernel in KERNELS.items() if name not in FUSED},
    **dict(zip(CARD_KERNELS, (None, None, *["gate_up", "weights"], *OF_PACKED), strict=True)),
    **{name: "packed" if name in PRODUCTS else None for name in BATCH_KERNELS},
}
FEW: dict[str, list[Any]] = {
    "embed": [T.Q4_K],
    "linear": DECODED,
    "kv_append": [("f16", "int8")],
    "attention": [("f16", "f16"), ("int8", "f16")],
    "expert_gate_up": [(T.Q4_K, T.Q4_K)],
    "expert_down": [T.Q6_K],
    "pool_gate_up": [(T.Q4_K, T.Q4_K)],
    "pool_down": [T.Q4_K],
    "batch_linear": [T.Q4_K],
    "batch_expert": [T.Q2_K],
    "batch_up": [T.Q4_0],
}


def few() -> list[Case]:
    return [(name, variant) for name in AXES for variant in FEW.get(name, [None])]


def others() -> list[Case]:
    """Return the rest; of pairs of weights those of a type with itself, and a mixed one."""
    found = [(name, one) for name, axis in AXES.items() for one in VARIANTS[axis]]
    seen, mixed = few(), ("expert_gate_up", (T.Q4_K, T.Q6_K))
    return [
        (name, one)
        for name, one in found
        if (name, one) not in seen
        and (name != "expert_gate_up" or one[0] == one[1] or (name, one) == mixed)
    ]


def label(case: Case) -> str:
    name, variant = case
    parts = variant if isinstance(variant, tuple) else (variant,)
    return "-".join([name, *(getattr(one, "name", one) for one in parts if one is not None)])


def lower(name: str, variant: Any) -> None:
    """Lower a kernel to machine code of every card, and look at what it is made of."""
    if name in OF_CARDS:
        names = list(OF_CARDS[name].arguments)
    else:
        names = [one.name for one in KERNELS[name].arguments]
    sizes = {one: SIZES[one] for one in names if one in SIZES}
    made = [one for rows in (1, 8) for one in shaped_for_card(name, variant, rows=rows, **sizes)]
    if (name, variant) == ("linear", T.Q4_K):  # and the norm of the row that it finishes
        norm = shaped("rms_norm", parts=1, width=SIZES["width"])
        one = shaped(name, variant, values=SIZES["values"], outputs=SIZES["width"], add=1)
        made += card_launches((one, norm), 1)
    if name == "kv_append":  # which a card launches together with what is before it
        rotation = {one: SIZES[one] for one in ("heads", "length", "planes")}
        made += card_launches((shaped("rope", **rotation), shaped(name, variant, **sizes)), 1)
    for one in {one.kernel.name: one for one in made}.values():
        lower_kernel(one.kernel, one.kinds)


def lower_kernel(found: GpuKernel, kinds: Sequence[str]) -> None:
    library, entry = llvm_code(found.function, kinds, "amdgpu")
    foreign, objects = amdgpu_lowering.lower(
        library.llvm_strs, entry, found.name, found.threads, SHARED_NAME, CARDS
    )
    assert not foreign, f"{found.name} needs what AMD's cards lack"
    for card in CARDS:
        code = objects[card]
        sections = amdgpu_lowering.symbols(code)
        assert sections[found.name], f"{found.name} is not in the code for {card}"
        assert sections[f"{found.name}.kd"], "the descriptor is what a launch names"
        unknown = [name for name, section in sections.items() if not section]
        assert not unknown, f"{found.name} is not whole on {card}"
        if found.name.startswith(OF_SHUFFLES):
            continue
        # In the object's notes, in which a zero is a zero byte: neither locals nor spills.
        assert b".private_segment_fixed_size\0" in code, f"{found.name} uses memory on {card}"


@pytest.mark.parametrize("case", few(), ids=label)
def test_a_kernel_becomes_code_of_other_cards(case: Case) -> None:
    lower(*case)


@pytest.mark.slow
def test_a_router_and_what_chooses_behind_it_become_code_of_other_cards() -> None:
    norm = shaped("rms_norm", parts=1, width=2048, x=1)
    linear = shaped("linear", T.F32, values=2048, outputs=128)
    route = shaped_for_card("route", experts=128, top_k=8)
    sizes = {"values": 2048, "outputs": 768, "top_k": 8}
    gate_up = shaped_for_card("expert_gate_up", (T.Q4_K, T.Q4_K), **sizes)
    router, early = with_routers([norm, linear, *route, *gate_up])
    for one in (router, early):
        assert isinstance(one, CardLaunch)
        lower_kernel(one.kernel, one.kinds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        tiles_attention_kernel(64, 64, is_whole=False),
        tiles_attention_kernel(64, 64, is_whole=True),
        batch_attention_kernel(64, 64),
    ],
    ids=lambda kernel: kernel.name,
)
def test_attention_of_a_batch_becomes_code_of_other_cards(kernel: GpuKernel) -> None:
    lower_kernel(kernel, [one.kind for one in KERNELS["attention"].arguments])


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(UNPACKED), ids=lambda kind: kind.name)
def test_floats_of_very_many_rows_become_code_of_other_cards(kind: TensorType) -> None:
    made = batch_float_tiles_kernel(kind, 2048)
    lower_kernel(made, [one.kind for one in KERNELS["linear"].arguments])


@pytest.mark.slow
@pytest.mark.parametrize("halves", [0, 1])
def test_what_prepares_many_rows_becomes_code_of_other_cards(halves: int) -> None:
    made = batch_prepare_kernel(("f16", "int8"), (128, 128), 64, halves)
    lower_kernel(made, [kind for _, kind in PREPARE])


@pytest.mark.slow
@pytest.mark.parametrize("case", others(), ids=label)
def test_every_variant_becomes_code_of_other_cards(case: Case) -> None:
    lower(*case)
