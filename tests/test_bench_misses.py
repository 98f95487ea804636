"""`strata_nb bench` on devices with fewer slots than experts: hits, the link, cold and steady."""

from __future__ import annotations

import json
import re
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from console import Console
from device_world import SHAPE, opened, random_tokens, read_in, same_bits
from make_model import make_model
from make_routes import make_routes

from strata_nb import Engine, Options, backend, link_rate
from strata_nb.cache.policy import Moves
from strata_nb.commands.bench_misses import Misses
from strata_nb.commands.bench_report import Case, Outcome, Run, as_tables
from strata_nb.errors import StrataError
from strata_nb.host import HostDriver, parse_host_devices
from strata_nb.plain_read import PlainRead

DEVICE = "host:1x64MiB"
EXPERTS = SHAPE.layers * SHAPE.experts


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("misses") / "model.gguf"
    make_model(path, SHAPE)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    for name in ("PLAIN_READ_BYTES", "PLAIN_READ_LEAST"):
        monkeypatch.setattr(backend, name, 1 << 20)
    return Console(capsys, monkeypatch)


def test_hits_and_the_link_are_those_of_the_routes_that_are_forced(
    run: Console, path: Path
) -> None:
    """With slots that nobody leaves and a route that repeats, each choice is known beforehand."""
    lines = np.tile(np.array([0, 1, 2], np.int16), (8, SHAPE.layers, 1))
    lines[4:] = [2, 3, 4]
    routes = path.with_name("known.npy")
    np.save(routes, lines)
    words = ["-m", str(path), "--device", DEVICE, "--expert-cache=9", "--adapt=off", "-p0", "-r2"]
    profile = path.with_name("profile.strp")
    with opened(path, "host", force_routes=routes) as model:
        read_in(model, random_tokens(4), 4)
        model.save_profile(profile)  # experts 0, 1 and 2 of each layer
        expert_bytes = sum(model.arena.layout.blob_bytes) / SHAPE.layers
    more = ["-n8", "--force-routes", str(routes), "--expert-profile", str(profile), "-ojson"]
    status, out, err = run("bench", *words, *more)
    assert status == 0, err
    (found,) = json.loads(out)["results"]
    misses = found["misses"]
    choices = 2 * 8 * 3 * SHAPE.layers  # two runs of eight tokens
    assert misses["hits"] + misses["misses"] == choices
    assert misses["hit_rate"] == pytest.approx((4 * 3 + 4 * 1) / (8 * 3))
    per_token = misses["misses"] / 16 * expert_bytes
    assert misses["link_bytes_per_token"] == pytest.approx(per_token, rel=1e-3)
    assert misses["link_bytes_per_s"] == pytest.approx(per_token * found["median_ts"], rel=1e-3)


def test_cold_begins_with_empty_slots_and_steady_behind_so_many_tokens(
    run: Console, path: Path
) -> None:
    routes = path.with_name("same.npy")
    np.save(routes, np.tile(np.array([4, 5, 6], np.int16), (1, SHAPE.layers, 1)))
    words = ["-m", str(path), "--device", DEVICE, "-p0", "-n3,5", "-r2", "--force-routes"]
    status, out, err = run("bench", *words, str(routes), "--cold=6", "--steady=20", "-ojson")
    assert status == 0, err
    found = json.loads(out)
    assert found["ctx_size"] == 20 + 5 + 1
    of = {one["test"]: one for one in found["results"]}
    assert list(of) == ["tg3", "tg5", "tg6 cold", "tg3 steady", "tg5 steady"]
    cold, steady = of["tg6 cold"], of["tg5 steady"]
    assert (cold["n_gen"], cold["phase"], cold["n_unmeasured"]) == (6, "cold", 0)
    assert (steady["n_gen"], steady["phase"], steady["n_unmeasured"]) == (5, "steady", 20)
    assert steady["bytes_per_token"] > of["tg5"]["bytes_per_token"]  # more K/V
    # Every token uses the same experts: they come at once, and miss nothing from then on.
    assert 0 < cold["misses"]["misses"] <= 2 * 2 * 3 * SHAPE.layers
    assert cold["misses"]["link_bytes"] > cold["misses"]["missed_bytes"]
    assert steady["misses"]["hit_rate"] == 1
    assert steady["misses"]["link_bytes"] == 0


def test_empty_slots_change_no_bit_and_fill_again(path: Path) -> None:
    ids = random_tokens(24)
    with opened(path, DEVICE) as model:
        first = read_in(model, ids, 1)
        assert model.arena.resident == EXPERTS
        model.empty_slots()
        assert model.arena.resident == 0
        model.ledger.check_integrity()
        assert same_bits(read_in(model, ids, 1), first)
        assert model.arena.resident > 0


def test_ctrl_c_comes_when_experts_have_left_their_slots(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path, DEVICE) as model:
        read_in(model, random_tokens(5), 1)
        arena, evict = model.arena, model.arena.evict

        def interrupted(layer: int, expert: int) -> int:
            signal.raise_signal(signal.SIGINT)
            return evict(layer, expert)

        monkeypatch.setattr(arena, "evict", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model._residency.carry_out(Moves([(0, 0), (1, 0)], []))
        assert arena.resident == EXPERTS - 2
        assert sum(map(len, arena.free_slots())) == 2
        with pytest.raises(KeyboardInterrupt):
            model.empty_slots()
        assert arena.resident == 0
        assert not arena.use.any()


def test_what_was_missed_before_slots_are_emptied_still_counts(path: Path) -> None:
    with opened(path, DEVICE, expert_cache="0") as model:  # policies are told nothing
        read_in(model, random_tokens(5), 1)
        missed_bytes = model.report().missed_bytes
        model.empty_slots()
        assert model.report().missed_bytes == missed_bytes > 0
        read_in(model, random_tokens(5), 1)
        assert model.report().missed_bytes == 2 * missed_bytes


def test_a_table_shows_hits_and_the_shares_of_link_and_limit(run: Console, path: Path) -> None:
    words = ["-m", str(path), "--device", DEVICE, "--expert-cache=50%", "-p4", "-n4", "-r1"]
    status, out, _ = run("bench", *words)
    assert status == 0
    head, _, *rows = out.split("\n\n")[0].splitlines()
    assert re.search(r"\| +hits \| link MB/token \| of link \| of limit \|$", head)
    assert [row.split("|")[-5].strip().endswith("%") for row in rows] == [True, True]
    assert [bool(row.split("|")[-2].strip()) for row in rows] == [False, True]
    assert re.search(r"^link: [\d,.]+ GB/s, the fastest of 10 over ", out, re.M)


def test_the_limit_is_a_token_of_hits_and_on_top_what_misses_read() -> None:
    misses = Misses(tokens=4, hits=30, misses=10, missed_bytes=400_000, link_bytes=600_000)
    about = {
        "model": "m",
        "model_size": 1 << 30,
        "model_n_params": 10**9,
        "options": {"force_routes": None, "overlap": True},
        "device": "cuda",
        "threads": 2,
        "commit": None,
        "clean_tree": None,
        "versions": {"strata_nb": "1"},
    }
    outcome = Outcome(Case(True, 2, 0), (0.004, 0.004), {}, 1_000_000, None, misses)
    done = Run(about, PlainRead(10**9, (1.0,)), [outcome], PlainRead(10**8, (1.0,)))
    use = done.link_use(outcome)
    assert use is not None
    assert use.bytes_per_s == pytest.approx(150_000 * 500)
    assert use.share == pytest.approx(0.75)
    assert use.share_of_limit == pytest.approx((0.001 + 0.001) * 500)
    row = as_tables(done).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")][-4:] == [
        "75.0%",
        "0.1",
        "75.0%",
        "100.0%",
    ]
    unknown = Run(about, "no", [outcome], "no room").link_use(outcome)
    assert unknown == (pytest.approx(75e6), None, None)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--cold=0"], "--cold 0: not usable"),
        (["--steady=-1"], "--steady -1: not usable"),
        (["--steady=8", "-n0"], "--steady 8: no tokens to write"),
        (["--cold=8", "-p0", "-n0"], "the device host has no slots"),
        (["--force-routes=nowhere.npy"], "--force-routes nowhere.npy: No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused(run: Console, words: list[str], cause: str) -> None:
    status, out, err = run("bench", "--device=host", *words)
    assert (status, out) == (2, "")
    assert cause in err
    assert "hint: " in err


def test_who_asks_for_slots_that_cannot_be_hears_why(
    run: Console, path: Path, tmp_path: Path
) -> None:
    dense = tmp_path / "dense.gguf"
    make_model(dense, replace(SHAPE, architecture="qwen3", experts=0, top_k=0, layers=1))
    hints = {
        "a larger --expert-cache": ["-m", str(path), "--device", DEVICE, "--expert-cache=0"],
        "the model has no experts": ["-m", str(dense), "--device", DEVICE],
    }
    for hint, words in hints.items():
        status, _, err = run("bench", *words, "--cold=4", "-p4", "-n4", "-r1")
        assert status == 2
        assert f"hint: {hint}" in err


def test_a_table_names_what_replaced_the_routers(run: Console, path: Path, tmp_path: Path) -> None:
    routes = tmp_path / "routes.npy"
    np.save(routes, np.tile(np.arange(SHAPE.top_k, dtype=np.int16), (9, SHAPE.layers, 1)))
    words = [
        "-m",
        str(path),
        "--device",
        DEVICE,
        "-p4",
        "-n4",
        "-r1",
        "--force-routes",
        str(routes),
    ]
    status, out, _ = run("bench", *words)
    assert status == 0
    assert f"\nroutes: {routes}, in place of what the routers choose\n" in out


def test_a_full_device_says_why_the_link_was_not_measured() -> None:
    with closing(HostDriver(parse_host_devices("host:1x1MiB"))) as driver:
        with pytest.raises(StrataError, match="1,048,576 bytes of device 0 are free"):
            link_rate.link_rate(driver, 0)
        assert driver.live() == {}
    with closing(HostDriver(parse_host_devices("host:1x8MiB"))) as driver:
        found = link_rate.link_rate(driver, 0)
        assert found.size_bytes == 4 << 20
        assert len(found.seconds) == link_rate.PASSES
        assert min(found.seconds) > 0
        assert driver.live() == {}


def test_made_routes_are_forced_whatever_the_device_is(path: Path, tmp_path: Path) -> None:
    routes = make_routes(layers=3, experts=16, top_k=3, tokens=40)
    np.save(tmp_path / "routes.npy", routes)
    options = Options(path, DEVICE, expert_cache="12", force_routes=tmp_path / "routes.npy")
    with Engine.open(options) as engine, engine.open_session() as session:
        session.extend(random_tokens(40))
        report = engine.describe()
    assert report.hits + report.misses == 3 * 3 * 40
    assert report.link_bytes == report.missed_bytes + report.inserted_bytes > 0
