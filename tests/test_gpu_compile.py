"""Every kernel of cards compiles for old and new targets, within its registers, without a card."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from inspect import signature
from itertools import product

import pytest
from gpu_launches import shaped, shaped_for_card

from strata_nb.formats import CACHE_TYPES
from strata_nb.formats import TensorType as T
from strata_nb.kernels.gpu import compile as gpu_compile
from strata_nb.kernels.gpu.batches import BATCH_KERNELS
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.intrinsics.ordering import AWAIT_PREVIOUS
from strata_nb.kernels.gpu.last_norm import with_last_norms
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.gpu.routed import CARD_KERNELS, FUSED, WITH_CPU
from strata_nb.kernels.gpu.router import with_routers
from strata_nb.kernels.gpu.tables import table_bytes
from strata_nb.kernels.program import Launch
from strata_nb.kernels.table import KERNELS
from strata_nb.packing import PACKED, UNPACKED

pytestmark = pytest.mark.usefixtures("garbage_later")

TARGETS = ("sm_75", "sm_90", "sm_120")
OTHER_TARGETS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_100", "sm_103", "sm_121")
KINDS = sorted(PACKED | UNPACKED)
LENGTHS = (128, 64, 80, 256)  # of heads, the usual one first
WIDTHS = (64, 1024, 2048, 8192)  # of rows: norms have more threads for wider ones
WIDTHS_OF_ONE_ROW = (2048, 512, 4096)  # of rows that blocks of products norm, the usual one first
LENGTHS_OF_PRODUCTS = (
    2048,
    256,
    8192,
)  # of rows, the usual one first
OF_ALL_LENGTHS = (T.Q4_K, T.IQ2_XS)  # the usual type, and one that needs most registers
GROUPS = (4, 1, 8)  # heads that share a K/V head
VOCABULARIES = (258, 4096, 151_936)
OF_BATCHES = (64, 4096)  # rows: few for a card, and many
OF_HEADS = {"kv_heads": 1, "table_width": 8}
EXPERTS = {"outputs": 64, "top_k": 8}
NAMES = [*(name for name in KERNELS if name not in FUSED), *CARD_KERNELS, *BATCH_KERNELS]
# Types of each way to multiply that need most registers.
IN_BATCHES = {"batch_linear": (T.Q2_K,), "batch_expert": (T.Q6_K,), "batch_up": (T.Q5_K,)}
# The usual type, and those that need most registers.
OF_EARLY, OF_QUERIES = (T.Q4_K, T.Q6_K, T.IQ1_M), ((T.Q4_K, T.Q4_K, T.Q6_K),)
UNTABLED = sorted(kind for kind in PACKED if table_bytes(kind) == 0)
ROUTERS = ((8, 2), (32, 4), (60, 4), (64, 8), (128, 8), (256, 8))


def _together(kinds: Sequence[T], values: int) -> tuple[Launch, ...]:
    """Return products of one row, which a card launches together."""
    products = [shaped("linear", kind, values=values) for kind in kinds]
    return tuple(one._replace(waits=number == 0) for number, one in enumerate(products))


TOGETHER = [
    _together(kinds, values)
    for kinds in ((T.Q4_K, T.Q4_K, T.Q6_K), (T.Q5_K, T.Q8_0))
    for values in (512, 2048, 8192)
]


def _normed(kinds: Sequence[T], widths: Sequence[int]) -> Iterator[CardLaunch]:
    """Yield products that finish a row together with its norm, as a card launches them."""
    for kind, width in product(kinds, widths):
        norm = shaped("rms_norm", parts=1, width=width)
        for values in LENGTHS_OF_PRODUCTS:
            one = shaped("linear", kind, values=values, outputs=width, add=1)
            yield from card_launches((one, norm), 1)
        for name in ("expert_down", "pool_down"):
            down = shaped_for_card(name, kind, values=768, outputs=width, top_k=8)
            for made in with_last_norms([*down, norm]):
                assert isinstance(made, CardLaunch)
                yield made


def _routers(kinds: Sequence[T], widths: Sequence[int]) -> Iterator[CardLaunch]:
    """Yield what leads to the choice of a row's experts, as a card launches it."""
    for kind, width, experts in product(kinds, widths, (128, 60)[: len(widths)]):
        norm = shaped("rms_norm", parts=1, width=width, out=1)  # not in place
        one = shaped("linear", kind, values=width, outputs=experts, x=1)
        route = shaped_for_card("route", True, experts=experts, top_k=8)
        for made in with_routers([norm, one, *route]):
            assert isinstance(made, CardLaunch)
            yield made


def _early(kinds: Sequence[T]) -> Iterator[CardLaunch]:
    """Yield what is launched behind a router where blocks of experts choose, as a card has it."""
    norm = shaped("rms_norm", parts=1, width=2048, out=1)
    one = shaped("linear", T.F32, values=2048, outputs=128, x=1)
    route = shaped_for_card("route", True, experts=128, top_k=8)
    for kind in kinds:
        sizes = {"values": 2048, "outputs": 768, "top_k": 8}
        gate_up = shaped_for_card("expert_gate_up", (kind, kind), **sizes)
        _, made = with_routers([norm, one, *route, *gate_up])
        assert isinstance(made, CardLaunch)
        yield made


def _rows_normed(kinds: Sequence[Sequence[T]]) -> Iterator[CardLaunch]:
    """Yield three products of a row that norm it."""
    for three in kinds:
        norm = shaped("rms_norm", parts=1, width=2048, x=1)
        products = [
            shaped("linear", kind, values=2048, outputs=count)
            for kind, count in zip(three, (4096, 512, 512), strict=True)
        ]
        q, *others = products
        yield from card_launches((norm, q, *(one._replace(waits=False) for one in others)), 1)


def _ready(lengths: Sequence[int]) -> Iterator[CardLaunch]:
    """Yield attention that makes its row ready, as a card launches it."""
    for length, group in product(lengths, GROUPS):
        sizes = {"key_length": length, "value_length": length}
        rotation = {"planes": length // 2, "halves": 1}
        store = shaped("kv_append", ("f16", "f16"), heads=1, **sizes, **rotation)
        attention = shaped("attention", ("f16", "f16"), heads=group, kv_heads=1, **sizes)
        rope = shaped("rope", length=length, heads=group, **rotation)
        yield from card_launches((rope, store, attention), 1)


def _in_own_order(lengths: Sequence[int]) -> Iterator[CardLaunch]:
    """Yield attention of many rows whose bits need not be those of a window."""
    for key_length, value_length in product(lengths, repeat=2):
        sizes = {"key_length": key_length, "value_length": value_length}
        one = shaped("attention", ("f16", "f16"), heads=8, **OF_HEADS, **sizes)
        yield from card_launches((one,), OF_BATCHES[-1], same_bits=False)


def _of_very_many_rows(*, lengths: bool) -> Iterator[CardLaunch]:
    """Yield products by weights of floats, and what makes queries, keys and values ready."""
    rows = OF_BATCHES[-1]
    floats = product(sorted(UNPACKED), (2048, 2880)) if lengths else [(T.F32, 2048), (T.F16, 2880)]
    for kind, values in floats:
        yield from card_launches((shaped("linear", kind, values=values, outputs=128),), rows)
    pairs = product(CACHE_TYPES, repeat=2) if lengths else [("f16", "f16")]
    for pair, length, halves in product(pairs, (128, 256), (0, 1)):
        rotation = {"planes": length // 2, "halves": halves}
        rope = shaped("rope", length=length, **rotation)
        store = shaped("kv_append", pair, key_length=length, value_length=length, **rotation)
        yield from card_launches((rope, store), rows)


Kernels = dict[str, CardLaunch]


@cache
def every_kernel(*, lengths: bool = False) -> Kernels:
    """Return kernels by name, each in a launch of it: of each kernel that a card has every type of
    weights, every pair of types of the K/V, every number of heads and of experts.

    lengths   also every type with every length of rows and every pair of types with every length
              of heads and number of them that share, not the usual one alone
    """
    found: Kernels = {}
    for name in NAMES:
        for variant, values in launches_of(name, lengths=lengths):
            for rows in _rows_of(name, variant, values, lengths=lengths):
                for made in shaped_for_card(name, variant, rows=rows, **values):
                    found[made.kernel.name] = made
            if name == "kv_append":  # which a card launches together with what is before it
                rope = shaped("rope", length=values["key_length"])
                for made in card_launches((rope, shaped(name, variant, **values)), 1):
                    found[made.kernel.name] = made
    together = (made for program in TOGETHER for made in card_launches(program, 1))
    widths = WIDTHS_OF_ONE_ROW if lengths else WIDTHS_OF_ONE_ROW[:1]
    normed = _normed(sorted(PACKED) if lengths else OF_ALL_LENGTHS, widths)
    routers = _routers(sorted(UNPACKED) if lengths else [T.F32], widths)
    ready = _ready((128, 64) if lengths else (128,))
    attention = _in_own_order((128, 64) if lengths else (128,))
    early = _early(sorted(PACKED) if lengths else OF_EARLY)
    others = [(kind,) * 3 for kind in UNTABLED] if lengths else []
    rows = _rows_normed([*OF_QUERIES, *others])
    many = _of_very_many_rows(lengths=lengths)
    for made in (*together, *normed, *routers, *ready, *early, *rows, *attention, *many):
        found[made.kernel.name] = made
    return found


def _rows_of(
    name: str, variant: object, values: dict[str, int], *, lengths: bool
) -> tuple[int, ...]:
    """Return for how many rows a card may have another kernel."""
    if name == "linear":
        return (1, 8, 64) if variant in UNPACKED else (1, 8)
    usual = name == "attention" and variant == ("f16", "f16")
    is_taken = usual and (lengths or values["key_length"] == LENGTHS[0])
    return (1, 8, *OF_BATCHES) if is_taken else (1, 8)


def launches_of(name: str, *, lengths: bool) -> Iterator[tuple[object, dict[str, int]]]:
    """Yield a variant and the arguments that decide about code, for each code of a kernel."""
    axis = KERNELS[name].axis if name in KERNELS else None
    if name == "embed":
        yield from ((kind, {}) for kind in KINDS)
    elif name in IN_BATCHES:
        kinds = sorted(PACKED) if lengths else IN_BATCHES[name]
        yield from ((kind, {}) for kind in kinds)
    elif name == "expert_fill":
        yield from ((None, {"experts": experts}) for experts, _ in ROUTERS)
    elif name.startswith("pool_"):
        for kind in sorted(PACKED) if lengths else OF_ALL_LENGTHS[:1]:
            variant = (kind, kind) if name == "pool_gate_up" else kind
            yield variant, {"values": LENGTHS_OF_PRODUCTS[0], **EXPERTS}
    elif axis == "weights" or name.startswith("expert_"):
        for kind in KINDS:
            count = 3 if lengths or kind in OF_ALL_LENGTHS else 1
            for values in (256, 257) if kind in UNPACKED else LENGTHS_OF_PRODUCTS[:count]:
                variant = (kind, kind) if name == "expert_gate_up" else kind
                yield variant, {"values": values} | (EXPERTS if name in CARD_KERNELS else {})
    elif axis == "keys_values":
        for pair, length, group in product(product(CACHE_TYPES, repeat=2), LENGTHS, GROUPS):
            halves = pair == ("f16", "f16")
            usual = halves or (length == LENGTHS[0] and (lengths or group == GROUPS[0]))
            if (usual or lengths) and (group == GROUPS[0] or (name == "attention" and usual)):
                sizes = {"key_length": length, "value_length": length}
                yield pair, sizes | (OF_HEADS | {"heads": group} if name == "attention" else {})
    elif name == "rms_norm":
        yield from ((None, {"width": width}) for width in WIDTHS)
    elif name == "sample":
        yield from ((None, {"vocabulary": vocabulary}) for vocabulary in VOCABULARIES)
    elif name == "batch_group":
        yield from ((None, {"top_k": top_k}) for top_k in (2, 8))
    elif name == "route":
        for (experts, top_k), decides in product(ROUTERS, (False, True, WITH_CPU)):
            yield decides, {"experts": experts, "top_k": top_k}
    else:
        yield None, {}


def faults(name: str, targets: Sequence[str]) -> list[str]:
    """Compile a kernel for targets; return what is wrong with its code."""
    launch = every_kernel(lengths=True)[name]
    kernel = launch.kernel
    code = gpu_compile.ptx_code(kernel, launch.kinds)
    found = [f"{name} computes in double precision"] if ".f64" in code else []
    # Without a mode of rounding the linker may join two of them to one, and quotients are near.
    if re.search(r"(add|sub|mul|mad|div)(\.full|\.approx)?(\.ftz)?\.f32", code):
        found.append(f"{name} leaves rounding to the linker")
    # What was launched before may still run until here.
    before, wait, _ = code.partition(AWAIT_PREVIOUS)
    if not wait or re.search(r"\b(st\.[\w.]*global|red\.|atom\.)", before):
        found.append(f"{name} writes before it waits for the launch in front")
    for target in targets:
        made = gpu_compile.link(code, target)
        # The oldest have as many as a block can have.
        most = kernel.registers if target != TARGETS[0] else min(255, 65_536 // kernel.threads)
        if made.registers > most or made.spill_bytes > kernel.spills:
            found.append(
                f"{name} for {target}: {made.registers} registers of {most}, "
                f"{made.spill_bytes} bytes spilt"
            )
    return found


def test_every_kernel_of_a_card_is_among_them() -> None:
    names = every_kernel()
    assert len(names) > 100
    assert [name for name in NAMES if not any(key.startswith(name) for key in names)] == []


def test_kernels_name_the_arguments_that_their_launches_have() -> None:
    for name, one in every_kernel(lengths=True).items():
        parameters = [word.lstrip("_") for word in signature(one.kernel.function).parameters]
        named = ["add" if word == "plus" else word for word in parameters]
        assert named == list(one.arguments), name


@pytest.mark.parametrize("name", sorted(every_kernel()))
def test_a_kernel_fits_its_registers_on_old_and_new_targets(name: str) -> None:
    assert faults(name, TARGETS) == []


def test_a_kernel_that_takes_too_many_registers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = every_kernel()["quantise"]
    tight = {"quantise": usual._replace(kernel=usual.kernel._replace(registers=8))}
    monkeypatch.setattr(sys.modules[__name__], "every_kernel", lambda *, lengths: tight)
    (fault,) = faults("quantise", TARGETS[1:2])
    assert "registers of 8" in fault


@pytest.mark.parametrize("store", ["st.global", "st.relaxed.gpu.global", "st.release.sys.global"])
def test_a_kernel_that_writes_before_it_waits_is_found(
    monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    code = gpu_compile.ptx_code(every_kernel()["quantise"].kernel, every_kernel()["quantise"].kinds)
    late = code.replace(AWAIT_PREVIOUS, "").replace("st.global", store) + AWAIT_PREVIOUS
    assert store in late
    monkeypatch.setattr(gpu_compile, "ptx_code", lambda *_: late)
    assert "waits" in faults("quantise", [])[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(every_kernel(lengths=True)))
def test_a_kernel_of_any_length_fits_its_registers_on_every_target(name: str) -> None:
    assert faults(name, (*TARGETS, *OTHER_TARGETS)) == []
