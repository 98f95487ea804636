"""The programs of bench/ that measure a card, run on what is no card."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import card_attention
import card_batches
import card_graphs
import card_long
import card_matrices
import card_memory
import card_misses
import card_one_batch
import card_products
import card_prompts
import card_tokens
import card_windows
import misses_picture
import numpy as np
import pytest
from card_world import Simulated, failing_card
from cuda_table_of_host import Launch
from device_world import SHAPE, TINY, make_tiny
from gpu_launches import shaped
from make_model import make_model

from strata_nb import Engine, Options, backend, models
from strata_nb.addresses import memory_view
from strata_nb.card_backend import CardBackend
from strata_nb.commands.bench_misses import Misses
from strata_nb.errors import StrataError, UnsupportedDevice
from strata_nb.formats import TensorType, row_bytes
from strata_nb.gguf import GGUFFile
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.packing import UNPACKED
from strata_nb.plain_read import PlainRead
from strata_nb.steps import Row

READ = PlainRead(10**9, (1e-3, 2e-3))  # 1,000 GB/s


class Programs:
    """Run a program's `main` and return what it wrote."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._path, self._patch = folder / "result.json", patch

    def __call__(self, program: Any, *words: str) -> Any:
        self._patch.setattr(sys, "argv", ["program", *words, f"-o{self._path}"])
        program.main()
        return json.loads(self._path.read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `--device cuda:0` be a simulated card, whose memory is said to be read at `READ`."""
    monkeypatch.setattr(card_graphs, "device_name", lambda device: f"{device}: a card")
    monkeypatch.setattr(card_graphs, "REPLAYS", 2)
    monkeypatch.setattr(CardBackend, "plain_read", lambda _: READ)
    with failing_card(budget_bytes=1 << 30) as (open_card, _):
        monkeypatch.setattr(backend, "open_card", lambda *_: open_card())
        yield


def made_up(
    simulated: Simulated, kernel: GpuKernel, kinds: Sequence[str]
) -> Callable[[Launch], None]:
    """Return what computes a kernel of routing or drawing; products are made up, by row and output.

    Other kernels do nothing: what they take in the simulator is too long for many windows.
    """
    if kernel.name.startswith(("route", "sample")):
        return compute(simulated, kernel, kinds)
    names = [*signature(kernel.function).parameters]
    layout = "@" + "".join("f" if kind == "float" else "q" for kind in kinds)

    def run(one: Launch) -> None:
        if kernel.name.startswith(("linear", "one_row")):
            words = dict(zip(names, struct.unpack(layout, one.arguments), strict=True))
            rows, outputs = memory_view(words["rows"], 8).view(np.int64)[0], words["outputs"]
            y = memory_view(words["y"], 4 * rows * outputs).view(np.float32)
            each = np.outer(1 + np.arange(rows), 1 + np.arange(outputs))
            y.reshape(rows, outputs)[:] = 3 * each % 4

    return run


compute = Simulated._runner


@pytest.fixture
def made_up_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulated, "_runner", made_up)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("programs") / "tiny.gguf"
    make_tiny(path)
    return str(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("programs") / "small.gguf"
    make_model(path, SHAPE)
    return str(path)


@pytest.mark.usefixtures("card")
def test_products_with_matrices_are_measured(
    run: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_matrices, "DIFFERENT_ROWS", 8)
    size = 2 * 8 * row_bytes(TensorType.Q6_K, 256)
    found = run(card_matrices, "--types=Q6_K,IQ4_XS", "--values=256", f"--bytes={size}")
    assert found["device"] == "cuda:0: a card"
    assert [row["type"] for row in found["rows"]] == ["Q6_K", "IQ4_XS"]
    row = found["rows"][0]
    assert (row["outputs"], row["bytes"], row["alone_us"]["n"]) == (16, size, 2)
    assert row["kernel"].startswith("one_row")
    rate = size / row["alone_us"]["median"] * 1e6
    assert row["alone_us"]["share"] == pytest.approx(rate / READ.bytes_per_s)


@pytest.mark.slow
@pytest.mark.usefixtures("card")
def test_products_of_a_batch_are_measured(run: Programs) -> None:
    words = ["--rows=9", "--types=Q8_0", "--shapes=8x64", "--experts=Q8_0,Q8_0,Q8_0"]
    found = run(card_batches, *words, "--layer=3,2,64,32")
    (one,) = found["dense"]
    assert one["same_bits_as_a_window"]
    assert one["tops"] == pytest.approx(2 * 9 * 8 * 64 / one["us"]["median"] / 1e6)
    assert [row["label"] for row in found["experts"]] == [
        "router_top_k",
        *["expert_group"] * 2,
        *["expert_gate_up"] * 3,
        *["expert_down"] * 2,
        "layer",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("card")
def test_attention_of_a_batch_is_measured(run: Programs) -> None:
    found = run(card_attention, "--rows=9", "--depths=0,70", "--heads=2,1,64")
    first, second = found["attention"]
    assert first["same_bits_as_a_window"]
    assert second["same_bits_as_a_window"]
    seen = 9 * 70 + 45
    assert second["tflops"] == pytest.approx(4 * 2 * 64 * seen / second["us"]["median"] / 1e6)


@pytest.mark.usefixtures("card")
def test_products_that_are_wrong_end_the_program(
    run: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_matrices, "DIFFERENT_ROWS", 8)
    monkeypatch.setattr(card_graphs.TimedGraph, "seconds", lambda _: [1.0])
    with pytest.raises(SystemExit, match="not right"):
        run(card_matrices, "--types=Q8_0", "--values=256", "--bytes=8000")


@pytest.mark.usefixtures("card", "made_up_products")
def test_windows_are_measured_beside_the_bytes_of_their_experts(run: Programs, tiny: str) -> None:
    found = run(card_windows, tiny, "--rows=1,2", "--depth=9", "--steps=1")
    one, two = found["rows"]
    assert one["experts_a_layer"] == TINY.top_k
    assert TINY.top_k < two["experts_a_layer"] <= TINY.experts
    assert one["ratio"] == 1
    assert one["same_bits"]
    assert two["same_bits"]
    cost = two["us"]["median"] / one["us"]["median"]
    assert two["ratio"] == pytest.approx(cost / (two["bytes"] / one["bytes"]))


@pytest.mark.usefixtures("card", "made_up_products")
def test_windows_with_other_bits_where_launches_do_not_overlap_end_the_program(
    run: Programs, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = CardBackend._launch

    def spoiled(card: CardBackend, one: CardLaunch, rows: int) -> None:
        if card.overlaps or one.label != "output":
            launch(card, one, rows)
        else:
            part = dict(one.arguments) | {"outputs": one.arguments["outputs"] - 1}
            launch(card, one._replace(arguments=part), rows)

    monkeypatch.setattr(CardBackend, "_launch", spoiled)
    with pytest.raises(SystemExit, match="not all logits"):
        run(card_windows, tiny, "--rows=1", "--depth=3", "--steps=1")


@pytest.mark.usefixtures("card", "made_up_products")
def test_every_launch_of_a_batch_has_a_limit(
    run: Programs, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, replayed = CardBackend._replay, list[int]()

    def counted(card: CardBackend, before: int, executable: int, *events: int) -> float:
        replayed.append(executable)
        return replay(card, before, executable, *events)

    monkeypatch.setattr(CardBackend, "_replay", counted)
    monkeypatch.setattr(card_one_batch, "REPLAYS", 1)
    found = run(card_one_batch, tiny, "--rows=9")
    assert len(replayed) == len(set(replayed))
    assert {line["label"] for line in found["lines"]} >= {"token_embd", "attn_q", "attention"}
    unknown = {line["kernel"] for line in found["lines"] if not line["limit_us"]}
    assert unknown == {"batch_slices", "combine_64"}  # which batches of many rows have not


@pytest.mark.parametrize("rows", [9, 4096])
@pytest.mark.parametrize("kind", sorted(UNPACKED), ids=lambda kind: kind.name)
def test_rows_of_products_by_floats_are_read_as_floats(
    tiny: str, kind: TensorType, rows: int
) -> None:
    with GGUFFile.open(Path(tiny)) as file:
        model = models.describe(file)
    for add, results in (0, 128), (1, 256):
        linear = shaped("linear", kind, values=2048, outputs=128, add=add)
        (one,) = card_launches((linear,), rows)
        assert card_one_batch.bytes_of_rows(one, rows, model) == rows * 4 * (2048 + results)


@pytest.mark.usefixtures("card", "made_up_products")
def test_norms_and_choices_are_profiled_apart_from_products(tiny: str) -> None:
    with Engine.open(Options(tiny, "cuda:0", ctx_size=64)) as engine:
        body = engine._device()._programs.body
        joined = {one.label.partition(".")[2] for one in card_launches(body, 1)}
        with card_products.apart():
            apart = {one.label.partition(".")[2] for one in card_launches(body, 1)}
    assert {one.rpartition(".")[2] for one in apart} >= {"attn_norm", "ffn_norm", "router_top_k"}
    assert not any("norm," in one for one in apart)
    assert any("norm," in one for one in joined)


@pytest.mark.usefixtures("card", "made_up_products")
def test_what_replayed_windows_count_is_put_back(tiny: str) -> None:
    with Engine.open(Options(tiny, "cuda:0", ctx_size=64)) as engine, ExitStack() as made:
        card, model = card_graphs.card_of(engine), engine._device()
        sequence = model.open_sequence()

        def read_a_token() -> None:
            model.choose([Row(sequence, 1, True)], [card_windows.GREEDY])
            model._settle()

        read_a_token()
        launches = card_launches(model._programs.window, 1)
        with card_graphs.put_back(card):
            card_graphs.TimedGraph(card, launches, 1, made).seconds()
        read_a_token()
        assert model.arena.use.sum() == 2 * TINY.layers * TINY.top_k


@pytest.mark.usefixtures("card", "made_up_products")
def test_tokens_are_the_same_whether_windows_begin_ahead(run: Programs, tiny: str) -> None:
    found = run(card_tokens, tiny, "--warm-up=2", "--tokens=3", "--runs=1", "--windows=2")
    assert found["same_tokens"]
    assert found["graph_us"]["n"] == 2
    assert found["overhead_ahead_us"] == pytest.approx(
        found["ahead_us"]["median"] - found["graph_us"]["median"]
    )


def test_growth_and_giving_are_measured(run: Programs, small: str) -> None:
    words = ("--cells=1024", "--texts=1", "--give=0.001", "--rounds=1")
    found = run(card_memory, small, "--device=host:1x64MiB", *words)
    assert found["same_tokens"]
    assert found["grown"]["growths"][0] > 0 == found["whole"]["growths"][0]
    assert found["grown"]["beside_ms"]["n"] == 1
    assert found["grown"]["beside_ms"]["median"] > found["whole"]["beside_ms"]["median"] == 0
    memory = found["memory"]
    assert memory["same_tokens"]
    assert memory["all_came_back"]
    assert memory["given_bytes"] > 2**20
    (round_,) = memory["rounds"]
    assert round_["resident_between"] < round_["resident_before"] == SHAPE.layers * SHAPE.experts
    assert round_["came_bytes"] > 0
    assert memory["parts_ms"]["give"]["unmap"] > 0
    assert memory["parts_ms"]["take"]["begin_fill"] > 0
    assert memory["parts_ms"]["take"]["rest"] > 0


MISSES = ("--device=host:1x64MiB", "--cold=6", "--after=10", "--tokens=8", "--runs=2")


def test_misses_are_measured_beside_the_limit_of_the_link(
    run: Programs, small: str, tmp_path: Path
) -> None:
    drawn = tmp_path / "misses.svg"
    words = ("--budgets=100,50", "--uniform=25", "--hits=0,50,100", f"--picture={drawn}")
    found = run(card_misses, small, *MISSES, *words)
    assert found["same_tokens"]
    rows = {(one["routes"], one["percent"], one["phase"]): one for one in found["rows"]}
    assert list(rows) == [
        ("like text", 100, "resident"),
        ("like text", 50, "cold"),
        ("like text", 50, "steady"),
        ("uniform", 25, "cold"),
        ("uniform", 25, "steady"),
        ("uniform", 0, "hits"),
        ("uniform", 50, "hits"),
        ("uniform", 100, "hits"),
    ]
    assert rows["like text", 100, "resident"]["hit_rate"] == 1
    by_hits = [rows["uniform", percent, "hits"] for percent in (0, 50, 100)]
    assert [by_hits[0]["hit_rate"], by_hits[2]["hit_rate"]] == [0, 1]
    assert by_hits[1]["hit_rate"] == pytest.approx(0.5, abs=0.2)
    assert by_hits[1]["link_bytes_per_token"] == by_hits[1]["missed_bytes_per_token"]
    nothing = by_hits[0]["missed_bytes_per_token"]
    assert nothing == pytest.approx(found["experts_bytes_per_token"], rel=1e-3)
    cold = rows["like text", 50, "cold"]
    assert cold["link_bytes_per_token"] > cold["missed_bytes_per_token"] > 0
    limit_s = found["resident_us"] / 1e6 + nothing / found["link_gb_per_s"] / 1e9
    assert by_hits[0]["limit"] == pytest.approx(1 / limit_s)
    assert by_hits[0]["share_of_limit"] == pytest.approx(
        by_hits[0]["tok_per_s"]["median"] * limit_s
    )
    dots = [one for one in ElementTree.parse(drawn).iter() if one.tag.endswith("circle")]
    assert len(dots) == len(rows) - 1 + 3  # the legend has three


def test_a_budget_that_fails_loses_no_other_and_no_limit_is_made_up(
    run: Programs, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = card_misses._write

    def failing(engine: Engine, *given: Any) -> Any:
        if engine.describe().slots == SHAPE.layers * SHAPE.experts:
            raise StrataError("the link is cut")
        return write(engine, *given)

    monkeypatch.setattr(card_misses, "_write", failing)
    drawn = tmp_path / "no.svg"
    words = ("--budgets=100,50", "--adapt=off,swap", "--uniform=", "--hits=")
    with pytest.raises(SystemExit, match="1 failed"):
        run(card_misses, small, *MISSES, *words, f"--picture={drawn}")
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert found["failed"] == ["like text, 100% in slots, off: the link is cut"]
    kinds = [(row["adapt"], row["phase"]) for row in found["rows"]]
    assert kinds == [("off", "cold"), ("off", "steady"), ("swap", "cold"), ("swap", "steady")]
    assert all(row["limit"] is None for row in found["rows"])
    assert not drawn.exists()


PROMPTS = ("--device=host:1x64MiB", "--rows=9,30", "--depth=40", "--first=12", "--runs=2")


def test_prompts_are_measured_at_budgets_depths_and_until_the_first_token(
    run: Programs, small: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="1 failed"):
        run(card_prompts, small, *PROMPTS, "--budgets=50,3", "--waits=3")
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    rows = {(row["tokens"], row["depth"], row["percent"]): row for row in found["rows"]}
    assert list(rows) == [(9, 0, 100), (30, 0, 100), (30, 40, 100), (30, 0, 50), (12, 0, 50)]
    (failed,) = found["failed"]
    assert failed.startswith("3% in slots: 1 expert slots")
    whole, half, first = rows[30, 0, 100], rows[30, 0, 50], rows[12, 0, 50]
    assert (whole["hit_rate"], whole["link_bytes"]) == (1, 0)
    assert 0 < half["hit_rate"] < 1
    assert half["share_of_link"] == pytest.approx(
        half["link_bytes"] / (half["ms"]["median"] / 1e3) / found["link_gb_per_s"] / 1e9
    )
    assert [row["until"] for row in (half, first)] == ["logits", "first token"]
    assert [row["ms"]["n"] for row in (half, first)] == [2, 3]


def test_a_long_run_is_measured_topic_by_topic(run: Programs, small: str) -> None:
    words = ("--device=host:1x64MiB", "--slots=50", "--texts=3", "--topics=2", "--topic=8")
    words += ("--deterministic",)
    found = run(card_long, small, *words)
    assert found["same_tokens"]
    assert found["tokens"] == 3 * 2 * 8
    assert [(one["text"], one["topic"]) for one in found["pieces"]] == [*np.ndindex(3, 2)]
    assert all(0 < one["hit_rate"] < 1 for one in found["pieces"])
    assert [one["tok_per_s"]["n"] for one in found["by_topic"]] == [2, 2]
    assert found["drift"]["device"]


def test_drift_is_the_largest_change_of_a_topic_and_any_byte_of_the_device() -> None:
    def piece(text: int, topic: int, seconds: float, hits: int, kv: int, rss: int) -> Any:
        misses = Misses(100, hits, 100 - hits, 0, 0)
        return card_long.Piece(text, topic, seconds, misses, {"kv": kv}, {}, None, rss)

    first = [piece(0, topic, 9.0, 10, 1, 0) for topic in range(2)]  # which does not count
    second = [piece(1, topic, 1.0, 50, 1, 5) for topic in range(2)]
    last = [piece(2, 0, 1.0, 50, 1, 6), piece(2, 1, 2.0, 48, 1, 8)]
    found = card_long.drift([*first, *second, *last], 2)
    assert found == pytest.approx(
        {"tok_per_s": -0.5, "hit_rate": -0.02, "rss_bytes": 3, "device": True}
    )
    last[0] = piece(2, 0, 1.0, 50, 2, 6)
    assert not card_long.drift([*first, *second, *last], 2)["device"]


def test_texts_that_differ_between_budgets_end_the_program(
    run: Programs, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = card_misses._write

    def spoiled(engine: Engine, session: Any, tokens: int, ids: list[int]) -> Any:
        part = write(engine, session, tokens, ids)
        if engine.describe().slots < SHAPE.layers * SHAPE.experts:
            ids[-1] += 1
        return part

    monkeypatch.setattr(card_misses, "_write", spoiled)
    words = ("--budgets=100,50", "--uniform=", "--hits=", f"--picture={tmp_path / 'no.svg'}")
    with pytest.raises(SystemExit, match="the tokens differ"):
        run(card_misses, small, *MISSES, *words)


@pytest.mark.parametrize(
    ("program", "word", "why"),
    [
        (card_misses, "--budgets=50", "no limit without a budget"),
        (card_misses, "--budgets=", "nothing to measure"),
        (card_misses, "--budgets=100,half", "100,half: not percents"),
        (card_misses, "--budgets=101", "101: not percents"),
        (card_misses, "--adapt=off,never", "--adapt never: not known; insert, swap, off"),
        (card_long, "--texts=2", "--texts 2: not usable; a whole number, 3 or more"),
        (card_prompts, "--rows=512,0", "--rows 512,0: not usable; whole numbers, 1 or more"),
        (card_misses, "--runs=0", "--runs 0: not usable; a whole number, 1 or more"),
        (card_misses, "--tokens=0", "--tokens 0"),
        (card_misses, "--cold=0", "--cold 0"),
        (card_misses, "--after=-1", "--after -1: not usable; a whole number, 0 or more"),
        (card_memory, "--texts=0", "--texts 0"),
        (card_memory, "--rounds=0", "--rounds 0"),
        (card_memory, "--cells=79", "--cells 79: not usable; a whole number, 80 or more"),
        (card_memory, "--cells=512", "--kv-init 512: a K/V for 512 cells"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_model_is_opened(
    run: Programs, small: str, monkeypatch: pytest.MonkeyPatch, program: Any, word: str, why: str
) -> None:
    monkeypatch.setattr(Engine, "open", pytest.fail)
    words = ["--uniform=", "--hits="] if program is card_misses else []
    with pytest.raises(SystemExit, match=why):
        run(program, small, *words, word)


@pytest.mark.parametrize("program", [card_windows, card_tokens])
def test_a_device_without_graphs_is_refused(run: Programs, tiny: str, program: Any) -> None:
    with pytest.raises(UnsupportedDevice, match="no graphs"):
        run(program, tiny, "--device=host:1x64MiB")


def test_a_picture_is_drawn_anew_with_a_line_for_link_and_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"routes": "uniform", "percent": 0, "adapt": "off", "phase": "hits", "hit_rate": 0.5}
    stored = {
        "model": "big.gguf",
        "resident_us": 1000.0,
        "experts_bytes_per_token": 200_000_000,
        "link_gb_per_s": 50.0,
        "rows": [{**row, "tok_per_s": {"median": 400.0}}],
    }
    result, drawn = tmp_path / "misses.json", tmp_path / "misses.svg"
    result.write_text(json.dumps(stored))
    for words, lines, said in (
        ([], 1, "120% of what the link allows"),
        (["--together=100"], 2, "120% of what the link allows, 80% of link and CPU together"),
    ):
        argv = ["misses_picture.py", str(result), *words, "-o", str(drawn)]
        monkeypatch.setattr(sys, "argv", argv)
        misses_picture.main()
        assert drawn.read_text().count("<polyline") == lines
        assert capsys.readouterr().out.strip().endswith(said)
