"""`strata_nb bench policy`: the table, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from console import Console
from make_routes import make_routes

from strata_nb.cache.profile import rank_by_use, save_profile
from strata_nb.cache.routing import count_use

POLICIES = ["static", "lru", "lfu", "swap", "insert", "optimum"]
LAYERS, EXPERTS = 2, 16


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    return Console(capsys, monkeypatch)


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("routes") / "routes.npy"
    np.save(path, make_routes(layers=LAYERS, experts=EXPERTS, top_k=3, tokens=600))
    return str(path)


def rows(output: str) -> list[list[str]]:
    """Return the cells of the table: slots, policy, hits, gap, over the link, to slots."""
    found = re.findall(
        r"^ *([\d.]+%) +([\d,]+)  (\w+) +([\d.]+)%  +([+-][\d.]+)?  +(\S.*?)  +(\S.*)$",
        output,
        re.M,
    )
    return [list(row) for row in found]


def test_every_policy_has_a_line_for_every_budget(run: Console, routes: str) -> None:
    status, out, err = run("bench", "policy", routes)
    assert (status, err) == (0, "")
    assert "300 tokens of 2 layers, 3 of 16 experts; profile of the 300 tokens before" in out
    table = rows(out)
    assert [row[2] for row in table] == POLICIES * 3
    assert [row[:2] for row in table[::6]] == [["10%", "3"], ["25%", "8"], ["50%", "16"]]
    for budget in range(3):
        lines = table[6 * budget : 6 * budget + 6]
        hits, moved = [float(row[3]) for row in lines], [float(row[5]) for row in lines]
        assert max(hits) == hits[-1]
        assert min(moved) == moved[-1]
        for line, rate in zip(lines[:-1], hits, strict=False):
            assert float(line[4]) == pytest.approx(rate - hits[-1], abs=0.11)
        # Of 6 choices a token the misses cross, and what swaps fetch.
        assert moved[0] == pytest.approx(6 * (1 - hits[0] / 100), abs=0.01)
    assert re.search(r"insert against the better of static and lru: [+-][\d.]+ points", out)


def test_with_the_size_of_an_expert_what_is_moved_is_said_in_bytes(
    run: Console, routes: str
) -> None:
    status, out, _ = run("bench", "policy", "--budgets=25", "--slot-bytes=2MiB", routes)
    plain = rows(run("bench", "policy", "--budgets", "25", routes)[1])
    table = rows(out)
    assert status == 0
    assert len(table) == 6
    for row, experts in zip(table, plain, strict=True):
        assert float(row[5].removesuffix(" MiB")) == pytest.approx(2 * float(experts[5]), abs=0.06)


def test_a_profile_is_learned_from_another_trace_or_given(
    run: Console, routes: str, tmp_path: Path
) -> None:
    other = make_routes(layers=LAYERS, experts=EXPERTS, top_k=3, tokens=400, seed=1)
    np.save(tmp_path / "other.npy", other)
    save_profile(tmp_path / "other.strp", rank_by_use(count_use(other, EXPERTS)))
    learned = run("bench", "policy", "--learn", str(tmp_path / "other.npy"), routes)
    given = run("bench", "policy", "--expert-profile", str(tmp_path / "other.strp"), routes)
    assert "600 tokens of 2 layers" in learned[1]
    assert rows(learned[1]) == rows(given[1])
    assert rows(learned[1])[0] != rows(run("bench", "policy", routes)[1])[0]


def test_several_traces_have_a_table_each(run: Console, routes: str, tmp_path: Path) -> None:
    second = tmp_path / "second.npy"
    np.save(second, make_routes(layers=1, experts=8, top_k=2, tokens=100))
    status, out, _ = run("bench", "policy", "--budgets=50", routes, str(second))
    assert status == 0
    assert [row[2] for row in rows(out)] == POLICIES * 2


def test_swaps_can_be_changed(run: Console, routes: str) -> None:
    def swap(*flags: str) -> list[str]:
        return rows(run("bench", "policy", "--budgets=25", *flags, routes)[1])[3]

    assert (
        swap("--adapt-every=0")[3:]
        == rows(run("bench", "policy", "--budgets=25", routes)[1])[0][3:]
    )
    assert swap("--adapt-swaps=1") != swap()
    assert swap("--adapt-decay=0.9") != swap()


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["policy"], "do not fit `strata_nb bench policy`"),
        (["speed", "ROUTES"], "do not fit `strata_nb bench`"),
        (["policy", "--budgets=10,x", "ROUTES"], "--budgets 10,x"),
        (["policy", "--budgets=101", "ROUTES"], "--budgets 101"),
        (["policy", "--budgets=", "ROUTES"], "--budgets : not shares"),
        (["policy", "--budgets=\u0663", "ROUTES"], "--budgets \u0663"),
        (["policy", "--experts=9", "ROUTES"], "--experts 9: ROUTES names 16"),
        (["policy", "--experts=40000", "ROUTES"], "--experts 40000"),
        (["policy", "--adapt-decay=2", "ROUTES"], "--adapt-decay 2.0"),
        (["policy", "--adapt-every=-1", "ROUTES"], "--adapt-every -1"),
        (["policy", "--learn=a.npy", "--expert-profile=b", "ROUTES"], "both given"),
        (["policy", "--learn=SMALL", "ROUTES"], "--learn SMALL: (layers, top-k) (1, 2)"),
        (["policy", "SHORT"], "one token"),
        (["policy", "TEXT"], "no numpy array: the magic string is not correct"),
        (["policy", "LARGE"], "no numpy array: mmap length is greater than file size"),
        (["policy", "FLOATS"], "float64 (2, 3), a routing trace is int16"),
        (["policy", "EMPTY"], "a routing trace of no choices: (0, 2, 3)"),
        (["policy", "TWICE"], "token 1, layer 0: experts [2, 2]"),
        (["policy", "NEGATIVE"], "token 0, layer 1: experts [-1, 2]"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    run: Console, routes: str, tmp_path: Path, words: list[str], cause: str
) -> None:
    files = {
        "SMALL": np.ones((9, 1, 2), np.int16) * np.array([0, 1], np.int16),
        "SHORT": np.zeros((1, 2, 1), np.int16),
        "FLOATS": np.zeros((2, 3)),
        "EMPTY": np.zeros((0, 2, 3), np.int16),
        "TWICE": np.array([[[0, 1], [1, 2]], [[2, 2], [0, 1]]], np.int16),
        "NEGATIVE": np.array([[[0, 1], [-1, 2]]], np.int16),
    }
    names = {
        "ROUTES": routes,
        **{name: str(tmp_path / f"{name}.npy") for name in ("TEXT", "LARGE")},
    }
    Path(names["TEXT"]).write_text("no array")
    with open(names["LARGE"], "wb") as file:  # a header alone, of more than any memory holds
        header = {"descr": "<i2", "fortran_order": False, "shape": (1 << 47, 3, 2)}
        np.lib.format.write_array_header_1_0(file, header)
    for name, array in files.items():
        names[name] = str(tmp_path / f"{name}.npy")
        np.save(names[name], array)
    pattern = re.compile("|".join(names))
    words = [pattern.sub(lambda found: names[found[0]], word) for word in words]
    status, out, err = run("bench", *words)
    assert (status, out) == (2, "")
    assert pattern.sub(lambda found: names[found[0]], cause) in err
    assert "hint: " in err or "names" not in err


def test_a_file_that_is_not_there_is_refused(run: Console, routes: str, tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    for words in ([none], ["--learn", none, routes], ["--expert-profile", none, routes]):
        status, _, err = run("bench", "policy", *words)
        assert status == 2
        assert f"{none}: No such file" in err
