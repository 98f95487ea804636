"""How much of a device is taken: limits, what is read again after loading, and what is said of it.

The card is made of host memory, its kernels do nothing, and it can lose memory behind our back when
graphs are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from card_world import IMAGE, Entry
from console import Console
from cuda_table_of_host import UNIT, FailingTable, HostTable
from device_world import load
from make_model import make_model
from model_shapes import ModelShape

from strata_nb import Engine, Options
from strata_nb.cache.plan import Plan
from strata_nb.card_backend import OUTSIDE_BYTES, RESERVE_BYTES, CardBackend
from strata_nb.device_model import DeviceModel
from strata_nb.driver import CudaDriver
from strata_nb.errors import ConfigError
from strata_nb.models.description import bytes_text
from strata_nb.reports import DeviceReport

MIB = 1 << 20
# Eight chunks of experts, and four of K/V for the whole context.
SHAPE = ModelShape(
    "qwen3moe", experts=8, top_k=2, vocab=258, dim=512, ff=1024, kv_heads=4, head_dim=128
)
CONTEXT = 2048
EXPERTS = SHAPE.layers * SHAPE.experts
GRAPHS = 3 * 8  # body, head and choice, for 1 to 8 rows
BESIDE = RESERVE_BYTES + OUTSIDE_BYTES


class Idle:
    """Compile kernels into ones that do nothing."""

    def __init__(self) -> None:
        self.kernels: dict[str, Callable[[object], None]] = {}

    def __call__(self, wanted: Any, progress: Any, say: Any) -> dict[str, Entry]:
        for kernel, _ in wanted:
            self.kernels[kernel.name] = lambda launch: None
        return {kernel.name: Entry(kernel.name) for kernel, _ in wanted}


class Taking(FailingTable):
    """Take memory of the card when the last graph of a model is made."""

    def __init__(self, cards: HostTable, taken_bytes: int) -> None:
        super().__init__(cards)
        self._cards, self._taken_bytes = cards, taken_bytes
        self.blocks: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        call = super().__getattr__(name)
        if name != "cuGraphInstantiateWithFlags" or not self._taken_bytes:
            return call

        def take(*arguments: Any) -> int:
            if self.calls[name] == GRAPHS - 1:
                self.blocks.append(self._cards.host.allocate(self._taken_bytes, 0))
            return call(*arguments)

        return take


class Card:
    """A card of `memory_bytes`, of which others use `others_bytes`, and graphs `graph_bytes`."""

    def __init__(self, memory_bytes: int, others_bytes: int = 0, graph_bytes: int = 0) -> None:
        self.idle = Idle()
        self.said: list[str] = []
        self.cards = HostTable(1, kernels={IMAGE: self.idle.kernels}, budget_bytes=memory_bytes)
        self.table = Taking(self.cards, graph_bytes)
        if others_bytes:
            self.table.blocks.append(self.cards.host.allocate(others_bytes, 0))

    @property
    def free_bytes(self) -> int:
        return self.cards.host.mem_info(0)[0]

    @property
    def in_use_bytes(self) -> int:
        free, total = self.cards.host.mem_info(0)
        return total - free

    def close(self) -> None:
        for block in self.table.blocks:
            self.cards.host.free(block)
        left = self.cards.live()
        self.cards.close()
        assert left == {}
        assert self.cards.refused == []


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a model whose experts take some chunks of a card."""
    path = tmp_path_factory.mktemp("models") / "wide.gguf"
    make_model(path, SHAPE)
    return path


@contextmanager
def opened(card: Card, path: Path, **options: Any) -> Iterator[DeviceModel]:
    options = {"kv_grow_init": 512, "kv_grow_step": 512, **options}
    with ExitStack() as around:
        around.callback(card.close)
        backend = CardBackend("cuda", CudaDriver(card.table), 0, card.idle, 1)
        around.enter_context(closing(backend))
        model = load(backend, path, ctx=CONTEXT, rows=8, say=card.said.append, **options)  # type: ignore[arg-type]
        with closing(model):
            yield model
            model.ledger.check_integrity()


def device_of(model: DeviceModel) -> DeviceReport:
    (device,) = model.report().devices
    return device


@pytest.fixture(scope="module")
def roomy(wide: Path) -> Plan:
    """The plan of a card on which everything has room."""
    with opened(Card(4096 * MIB), wide) as model:
        assert device_of(model).slots == EXPERTS
        return model.ledger.plan


def full_bytes(plan: Plan) -> int:
    """Return what is taken of a card where all experts and the whole K/V have room."""
    chunks = plan.start.experts + plan.kv_chunks
    return plan.needs.dense_bytes + chunks * plan.chunk_bytes


def numbers(error: ConfigError) -> dict[str, int]:
    """Return the lines of a sum, by name."""
    lines = [line.split(maxsplit=1) for line in error.message.splitlines()[1:]]
    return {name: int(number.replace(",", "")) for number, name in lines}


FIXED: dict[str, Any] = {"kv_grow": False, "kv_grow_init": None, "kv_grow_step": None}


# What is read again after loading.


@pytest.fixture(scope="module")
def slack_bytes(wide: Path, roomy: Plan) -> int:
    """What graphs may take of the card of the tests below until just the reserve is free."""
    card = Card(full_bytes(roomy) + BESIDE)
    with opened(card, wide, **FIXED):
        return card.free_bytes - RESERVE_BYTES


@pytest.mark.parametrize(
    ("beyond_bytes", "chunks"), [(-4096, 0), (0, 0), (4096, 1), (UNIT, 1), (UNIT + 4096, 2)]
)
def test_what_graphs_take_beyond_the_plan_is_given_back_to_the_chunk(
    wide: Path, roomy: Plan, slack_bytes: int, beyond_bytes: int, chunks: int
) -> None:
    card = Card(full_bytes(roomy) + BESIDE, graph_bytes=slack_bytes + beyond_bytes)
    with opened(card, wide, **FIXED) as model:
        plan, held = model.ledger.plan, model.ledger.holdings()
        assert plan.chunk_bytes == UNIT
        assert plan.start.chunks - held.chunks == chunks
        assert plan.start.kv == held.kv
        assert RESERVE_BYTES <= card.free_bytes < RESERVE_BYTES + UNIT
        assert model.warnings == []
        assert len(card.said) == (chunks > 0)
        for line in card.said:
            slots = device_of(model).slots
            assert line.endswith(f"{2 * chunks}.0 MiB given back, {slots} slots of 16 are left")


def test_chunks_that_wait_for_the_kv_go_before_experts_do(wide: Path, roomy: Plan) -> None:
    card = Card(full_bytes(roomy) + BESIDE)
    with opened(card, wide) as model:
        spare, slack = model.ledger.holdings().spare, card.free_bytes - RESERVE_BYTES
    assert spare > 0
    card = Card(full_bytes(roomy) + BESIDE, graph_bytes=slack + UNIT)
    with opened(card, wide) as model:
        assert device_of(model).slots == EXPERTS
        assert card.free_bytes >= RESERVE_BYTES


def test_where_nothing_is_left_to_give_a_warning_says_what_is_free(wide: Path, roomy: Plan) -> None:
    card = Card(full_bytes(roomy) + BESIDE, graph_bytes=BESIDE - MIB)
    with opened(card, wide, **FIXED) as model:
        assert model.ledger.holdings().experts == model.ledger.plan.floor_chunks
        (line,) = model.warnings
        assert re.fullmatch(
            r"only [\d.]+ MiB are free of the 700.0 MiB that are to stay free for others", line
        )
        read = model.open_sequence()
        model.make_room(read, 8, prompt=True)


def test_the_reserve_that_is_kept_is_the_one_that_was_asked_for(wide: Path, roomy: Plan) -> None:
    memory = full_bytes(roomy) + OUTSIDE_BYTES + 5 * MIB
    card = Card(memory, graph_bytes=OUTSIDE_BYTES + 2 * MIB)
    with opened(card, wide, vram_reserve_mib=5, **FIXED) as model:
        assert device_of(model).slots < EXPERTS
        assert model.warnings == []
        assert 5 * MIB <= card.free_bytes < 5 * MIB + UNIT


# Limits.


@pytest.mark.parametrize("others_bytes", [0, 40 * MIB])
@pytest.mark.parametrize("beyond_bytes", [-6 * UNIT, -UNIT, -4096, 0, 4096, 50 * UNIT])
def test_a_limited_card_is_used_as_a_card_of_that_size(
    wide: Path, roomy: Plan, beyond_bytes: int, others_bytes: int
) -> None:
    size = full_bytes(roomy) + BESIDE + beyond_bytes + others_bytes
    with opened(small := Card(size, others_bytes), wide) as model:
        expected, slots = model.ledger.plan, device_of(model).slots
        free = small.free_bytes
    card = Card(4096 * MIB, others_bytes)
    with opened(card, wide, vram_limit=size) as model:
        plan, device = model.ledger.plan, device_of(model)
        assert replace(plan, needs=expected.needs) == expected
        assert plan.needs.beside_bytes == expected.needs.beside_bytes
        assert device.slots == slots
        assert size - card.in_use_bytes == free == device.free_bytes
        assert device.total_bytes == size
        assert device.limit_text == f"limited to {bytes_text(size)} of 4.00 GiB"


def test_all_of_a_device_is_somebodys_or_free(wide: Path, roomy: Plan) -> None:
    size = full_bytes(roomy) + BESIDE + 30 * MIB
    with opened(Card(4096 * MIB, 30 * MIB), wide, vram_limit=size) as model:
        device = device_of(model)
        owners = dict(device.bytes_by_owner)
        given_back = owners.pop("given_back")
        assert owners["outside"] >= 30 * MIB
        assert sum(owners.values()) + (device.free_bytes or 0) == size
        assert given_back > 0


def test_graphs_that_take_more_under_a_limit_leave_what_is_in_use_below_it(
    wide: Path, roomy: Plan
) -> None:
    size = full_bytes(roomy) + OUTSIDE_BYTES
    card = Card(4096 * MIB, graph_bytes=OUTSIDE_BYTES + 3 * UNIT)
    with opened(card, wide, vram_limit=size, vram_reserve_mib=0, **FIXED) as model:
        assert size - UNIT < card.in_use_bytes <= size
        assert device_of(model).slots < EXPERTS
        assert len(card.said) == 1


def test_a_limit_that_graphs_break_all_the_same_is_refused_with_the_sum(
    wide: Path, roomy: Plan
) -> None:
    size = full_bytes(roomy) + OUTSIDE_BYTES
    graph_bytes = OUTSIDE_BYTES + full_bytes(roomy)
    options = {"vram_reserve_mib": 0, **FIXED}
    card = Card(4096 * MIB, 8 * MIB, graph_bytes=graph_bytes)
    with (
        pytest.raises(ConfigError, match="does not fit after it was loaded") as refused,
        opened(card, wide, vram_limit=size, **options),
    ):
        pass
    found = numbers(refused.value)
    allowed, missing = found.pop("allowed by --vram-limit"), found.pop("missing")
    needed = found.pop("needed")
    assert allowed == size
    assert missing == needed - allowed > 0
    assert sum(found.values()) == needed
    assert found["dense weights and buffers"] == roomy.needs.dense_bytes
    assert found["driver, modules and graphs, other programs since"] >= graph_bytes
    mib = int(refused.value.hint.removeprefix("--vram-limit ").split("MiB")[0])
    for more, fits in ((0, True), (-1, False)):
        card = Card(4096 * MIB, 8 * MIB, graph_bytes=graph_bytes)
        limit = {"vram_limit": (mib + more) * MIB}
        if fits:
            with opened(card, wide, **limit, **options) as model:
                assert card.in_use_bytes <= mib * MIB
                assert model.ledger.holdings().experts == model.ledger.plan.floor_chunks
        else:
            with pytest.raises(ConfigError), opened(card, wide, **limit, **options):
                pass


@pytest.mark.parametrize("others_bytes", [0, 3000 * MIB])
def test_a_limit_that_is_too_small_is_refused_before_anything_is_done(
    wide: Path, others_bytes: int
) -> None:
    card = Card(4096 * MIB, others_bytes)
    with (
        pytest.raises(ConfigError, match="the model does not fit") as refused,
        opened(card, wide, vram_limit=960 * MIB),
    ):
        pass
    assert card.idle.kernels == {}
    assert card.table.calls["cuMemAlloc"] == card.table.calls["cuMemCreate"] == 0
    found = numbers(refused.value)
    assert found["driver, modules and graphs"] == OUTSIDE_BYTES
    assert found["kept free for others"] == RESERVE_BYTES
    assert found.get("in use before: the context, other programs", 0) == others_bytes
    assert found["allowed by --vram-limit"] == 960 * MIB
    assert "free on the device" not in found


def test_the_limit_that_a_refusal_names_is_enough_and_one_less_is_not(wide: Path) -> None:
    options = {"vram_reserve_mib": 0}
    with (
        pytest.raises(ConfigError) as refused,
        opened(Card(4096 * MIB), wide, vram_limit=MIB, **options),
    ):
        pass
    mib = int(refused.value.hint.removeprefix("--vram-limit ").split("MiB")[0])
    with opened(Card(4096 * MIB), wide, vram_limit=mib * MIB, **options) as model:
        assert device_of(model).slots >= SHAPE.layers
    with (
        pytest.raises(ConfigError),
        opened(Card(4096 * MIB), wide, vram_limit=(mib - 1) * MIB, **options),
    ):
        pass


@pytest.mark.parametrize("limit", [4096 * MIB, 1 << 50])
def test_a_limit_of_more_than_the_card_has_changes_nothing_and_says_so(
    wide: Path, roomy: Plan, limit: int
) -> None:
    with opened(Card(4096 * MIB), wide, vram_limit=limit) as model:
        plan, device = model.ledger.plan, device_of(model)
        assert replace(plan, needs=roomy.needs) == roomy
        assert device.limit_text == ""
        (line,) = model.warnings
        assert line.endswith("the device has 4.00 GiB, so nothing is limited")


def test_a_card_that_is_too_small_itself_is_refused_as_without_a_limit(wide: Path) -> None:
    said = []
    for limit in (None, 1 << 50):
        with pytest.raises(ConfigError) as refused, opened(Card(64 * MIB), wide, vram_limit=limit):
            pass
        said.append((refused.value.message, refused.value.hint))
    assert said[0] == said[1]
    assert "67,108,864  free on the device" in said[0][0]


def test_memory_that_is_taken_back_stays_within_the_limit(wide: Path, roomy: Plan) -> None:
    size = full_bytes(roomy) + BESIDE - 3 * UNIT
    card = Card(4096 * MIB)
    with opened(card, wide, vram_limit=size, vram_elastic=True) as model:
        model.set_reserve(RESERVE_BYTES + 4 * UNIT)
        assert size - card.in_use_bytes >= RESERVE_BYTES + 4 * UNIT
        done = model.set_reserve(0)
        assert done.device.slots == EXPERTS
        model.make_room(model.open_sequence(), CONTEXT, prompt=True)
        assert card.in_use_bytes <= size
        model.set_reserve(None)
        assert card.in_use_bytes <= size - RESERVE_BYTES


def test_what_the_driver_may_still_take_is_left_to_it(wide: Path, roomy: Plan) -> None:
    card = Card(full_bytes(roomy) + BESIDE - 5 * UNIT)
    with opened(card, wide, vram_elastic=True) as model:
        slots = device_of(model).slots
        tables = RESERVE_BYTES + OUTSIDE_BYTES - card.free_bytes
        assert 0 < tables < UNIT
        model.set_reserve(BESIDE + 2 * UNIT)
        assert device_of(model).slots < slots
        assert model.set_reserve(None).device.slots == slots
        model.make_room(model.open_sequence(), CONTEXT, prompt=True)
        assert device_of(model).slots < slots
        assert card.free_bytes == RESERVE_BYTES + OUTSIDE_BYTES - tables


# Small devices of the host, and what is said.


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    return Console(capsys, monkeypatch)


def test_a_limited_small_device_writes_the_same_and_says_that_it_is_limited(
    run: Console, tiny: Path
) -> None:
    words = ["generate", "-m", str(tiny), "--device", "host:1x64MiB", "-c", "128"]
    words += ["--temp", "0", "-n", "8", "--ignore-eos", "hello"]
    _, whole, err = run(*words)
    assert "limited" not in err
    first, *_ = err.splitlines()
    assert re.fullmatch(
        r"host:1x64MiB: slots for 6 of 6 experts \(100%, [\d.]+ KiB\); K/V for 128 of 128 cells "
        r"\([\d.]+ KiB\); weights and buffers [\d.]+ MiB; free [\d.]+ MiB of 64.0 MiB",
        first,
    ), first
    status, out, err = run(*words, "--vram-limit", "8MiB")
    assert (status, out) == (0, whole)
    first, *_, last = err.splitlines()
    assert first.startswith("host:1x64MiB, limited to 8.0 MiB of 64.0 MiB: slots for 6 of 6")
    assert last.count("limited to 8.0 MiB of 64.0 MiB") == 1


def test_devices_without_memory_of_their_own_have_no_limit(tiny: Path) -> None:
    for device in ("host", "reference"):
        with pytest.raises(ConfigError, match=r"--vram-limit 12.00 GiB: the (device host|ref)"):
            Engine.open(Options(tiny, device=device, vram_limit=12 << 30))


@pytest.mark.parametrize(
    ("options", "off"),
    [
        ({}, []),
        (
            {"expert_cache": "4", "cpu_pool": False},
            [
                "experts computed by the CPU (--no-cpu-pool)",
                "slots for 12 experts (--expert-cache 4)",
            ],
        ),
        (
            {"expert_cache": "0", "cpu_pool": False},
            [
                "experts computed by the CPU (--no-cpu-pool)",
                "slots for 16 experts (--expert-cache 0)",
            ],
        ),
        (
            {"adapt": "off", **FIXED},
            ["following the text (--adapt off)", "growth of the K/V (--no-kv-grow)"],
        ),
    ],
)
def test_what_is_off_is_said_with_the_reason(
    wide: Path, options: dict[str, Any], off: list[str]
) -> None:
    with opened(Card(4096 * MIB), wide, **options) as model:
        assert model.off == off


def test_experts_that_have_no_room_are_counted_after_memory_was_given_back(
    wide: Path, roomy: Plan
) -> None:
    card = Card(full_bytes(roomy) + BESIDE, graph_bytes=BESIDE - MIB)
    with opened(card, wide, **FIXED) as model:
        missing = EXPERTS - device_of(model).slots
        assert f"slots for {missing} experts (no room for more)" in model.off
