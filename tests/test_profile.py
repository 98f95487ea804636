"""Expert profiles and routing traces: what is written is read back, and nothing else is read."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_routes import make_routes

from strata_nb.cache.profile import (
    Profile,
    load_profile,
    rank_by_use,
    save_profile,
)
from strata_nb.cache.routing import RoutingTrace
from strata_nb.errors import ConfigError, FileFormatError, RuleViolation

LAYERS, EXPERTS = 3, 5


def some_profile() -> Profile:
    ranked = np.array([[2, 4], [0, 0], [1, 3], [2, 0]], np.uint16)
    return Profile(LAYERS, EXPERTS, ranked, slots=6)


# Ranking.


def test_experts_are_ranked_by_use_and_equal_ones_by_the_profile_before() -> None:
    use = np.array([[0, 7, 0], [9, 0, 7]])
    assert rank_by_use(use).order() == [(1, 0), (0, 1), (1, 2), (0, 0), (0, 2), (1, 1)]
    prior = Profile(2, 3, np.array([[1, 1], [1, 2], [0, 2]], np.uint16), slots=3)
    wanted = [(1, 0), (1, 2), (0, 1), (1, 1), (0, 2), (0, 0)]
    assert rank_by_use(use, prior).order() == wanted


def test_ranks_say_where_in_the_list_an_expert_is() -> None:
    ranks = some_profile().ranks()
    assert ranks.dtype == np.int32
    assert ranks.tolist() == [[1, -1, -1, -1, -1], [-1, -1, -1, 2, -1], [3, -1, -1, -1, 0]]


def test_a_model_that_the_format_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="65,536"):
        rank_by_use(np.zeros((65537, 1), np.int64))


# The file.


def test_the_bytes_of_a_profile_are_those_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    save_profile(path, Profile(1, 2, np.array([[0, 1]], np.uint16), slots=2))
    header = b"STRP" + struct.pack("<5I", 1, 1, 2, 2, 1)
    assert path.read_bytes() == header + struct.pack("<2H", 0, 1) + struct.pack("<2i", -1, 0)


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=5))
def test_what_is_saved_is_loaded(use: list[list[int]]) -> None:
    profile = rank_by_use(np.array(use))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "profile"
        save_profile(path, profile)
        loaded = load_profile(path, len(use), 4)
    assert loaded.order() == profile.order()
    assert loaded.slots == profile.slots


def set_at(offset: int, value: int) -> Callable[[bytes], bytes]:
    packed = struct.pack("<I", value)
    return lambda data: data[:offset] + packed + data[offset + 4 :]


@pytest.mark.parametrize(
    ("damage", "offset", "message"),
    [
        (lambda data: data[:23], 0, "23 bytes"),
        (lambda data: b"GGUF" + data[4:], 0, "no expert profile"),
        (lambda data: set_at(4, 2)(set_at(8, 9)(data)), 4, "version 2"),
        (set_at(8, 4), 8, "made for 4 layers of 5 experts, the model has 3 of 5"),
        (set_at(12, 6), 8, "made for 3 layers of 6"),
        (set_at(16, 3), 20, "4 ranked experts, of 3 slots"),
        (lambda data: set_at(16, 2**32 - 1)(set_at(20, 16)(data)), 20, "15 experts"),
        (set_at(20, 3), 96, "100 bytes, should be 96"),
        (lambda data: data[:-1], 99, "99 bytes, should be 100"),
        (lambda data: data + b"\0", 100, "101 bytes, should be 100"),
        (set_at(28, 3), 28, "rank 1 is expert 0 of layer 3: not there"),
        (set_at(28, 5 << 16), 28, "rank 1 is expert 5 of layer 0: not there"),
        (set_at(36, 2 | 4 << 16), 36, "rank 3 is expert 4 of layer 2: .*ranked twice"),
        (set_at(44, 1), 44, "rank 1 disagrees"),
        (set_at(40, 0xFFFFFFFF), 40, "rank -1 disagrees"),
    ],
)
def test_a_damaged_profile_is_refused_where_the_damage_is(
    tmp_path: Path, damage: Callable[[bytes], bytes], offset: int, message: str
) -> None:
    path = tmp_path / "profile"
    save_profile(path, some_profile())
    load_profile(path, LAYERS, EXPERTS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FileFormatError, match=message) as refused:
        load_profile(path, LAYERS, EXPERTS)
    assert refused.value.offset == offset


def test_whatever_byte_is_damaged_the_file_is_refused_or_still_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    save_profile(path, some_profile())
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            loaded = load_profile(path, LAYERS, EXPERTS)
        except FileFormatError:
            continue
        assert 16 <= at < 20  # the number of slots says nothing about the list
        assert loaded.order() == some_profile().order()


# Replacing a file.


def test_a_place_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        save_profile(tmp_path / "nowhere" / "profile", some_profile())
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        save_profile(tmp_path / "directory", some_profile())
    assert [path.name for path in tmp_path.iterdir()] == ["directory"]


# Routing traces.


def test_a_trace_is_saved_as_make_routes_saves_it(tmp_path: Path) -> None:
    made = make_routes(layers=3, experts=16, top_k=2, tokens=40)
    np.save(tmp_path / "made.npy", made)
    trace = RoutingTrace(3, 16, 2)
    for start, end in ((0, 7), (7, 7), (7, 8), (8, 40)):
        trace.append(made[start:end].astype(np.int64))
    assert trace.tokens == 40
    trace.save(tmp_path / "trace.npy")
    assert (tmp_path / "trace.npy").read_bytes() == (tmp_path / "made.npy").read_bytes()
    assert np.array_equal(np.load(tmp_path / "trace.npy"), made)


def test_a_trace_of_no_token_is_an_empty_array(tmp_path: Path) -> None:
    trace = RoutingTrace(3, 16, 2)
    trace.save(tmp_path / "trace")
    loaded = np.load(tmp_path / "trace")
    assert loaded.shape == (0, 3, 2)
    assert loaded.dtype == np.int16


def test_a_trace_keeps_what_was_appended_when_the_array_is_used_again() -> None:
    trace = RoutingTrace(1, 16, 2)
    routes = np.array([[[1, 2]]], np.int16)
    trace.append(routes)
    routes[:] = 9
    trace.append(routes)
    assert trace.routes().tolist() == [[[1, 2]], [[9, 9]]]


@pytest.mark.parametrize("routes", [[[[0, 16]]], [[[-1, 0]]], [[[0]]], [[[0, 1], [0, 1]]]])
def test_routes_that_the_model_cannot_have_are_refused(routes: list[list[list[int]]]) -> None:
    trace = RoutingTrace(1, 16, 2)
    with pytest.raises(RuleViolation, match="rule 16"):
        trace.append(np.array(routes))
    assert trace.tokens == 0


def test_more_experts_than_a_trace_can_name_are_refused() -> None:
    RoutingTrace(1, 32768, 2).append(np.array([[[32767, 0]]]))
    with pytest.raises(ConfigError, match="32,768"):
        RoutingTrace(1, 32769, 2)
