"""What a file says about itself: typed, bounded, and exactly as it was written."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf_bytes as raw
import numpy as np
import pytest
from gguf_bytes import Tensor, array, build, keys_of, layout, put, refusal, scalar
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_nb.errors import FileFormatError
from strata_nb.gguf import GGUFFile
from strata_nb.metadata import MAX_HEAD_BYTES, Metadata


def test_metadata_are_typed_and_note_what_was_asked_for(tmp_path: Path) -> None:
    keys = {
        "general.architecture": scalar(raw.STRING, "llama"),
        "llama.block_count": scalar(raw.UINT32, 7),
        "llama.long": scalar(raw.UINT64, 2**40),
        "llama.small": scalar(raw.INT8, -3),
        "llama.eps": scalar(raw.FLOAT32, 0.5),
        "llama.wide": scalar(raw.FLOAT64, 1e-300),
        "llama.on": scalar(raw.BOOL, True),
        "t.tokens": array(raw.STRING, ["<s>", "", "naïve", b"\xe2\x96", "Ġthe"]),
        "t.types": array(raw.INT32, [1, -2, 3]),
        "t.scores": array(raw.FLOAT32, [0.25, -1000.0]),
        "t.flags": array(raw.BOOL, [True, False]),
        "t.none": array(raw.STRING, []),
        "t.nothing": array(raw.UINT8, []),
    }
    built = layout(keys)
    metadata = keys_of(built.data, tmp_path)
    assert list(metadata) == list(keys)
    assert len(metadata) == len(keys)
    assert metadata["llama.block_count"] == 7
    assert metadata["t.tokens"] == ["<s>", "", "naïve", "\udce2\udc96", "Ġthe"]
    assert metadata.unread("llama.") == [key for key in keys if key.startswith("llama.")]

    assert metadata.text("general.architecture") == "llama"
    assert metadata.integer("llama.block_count") == 7
    assert metadata.integer("llama.long", high=2**40) == 2**40
    assert metadata.integer("llama.small", low=-3) == -3
    assert metadata.real("llama.eps") == 0.5
    assert metadata.real("llama.wide") == 1e-300
    assert metadata.real("llama.block_count") == 7.0
    assert metadata.unread("llama.") == ["llama.on"]
    assert metadata.boolean("llama.on") is True
    assert metadata.unread("llama.") == []
    assert metadata.texts("t.none") == []
    tokens = metadata.texts("t.tokens")
    assert tokens[3].encode("utf-8", "surrogateescape") == b"\xe2\x96"
    tokens.clear()
    assert len(metadata.texts("t.tokens")) == 5
    types = metadata.integers("t.types")
    assert types.dtype == np.int64
    assert types.tolist() == [1, -2, 3]
    assert metadata.integers("t.nothing").tolist() == []
    scores = metadata.reals("t.scores")
    assert scores.dtype == np.float64
    assert scores.tolist() == [0.25, -1000.0]
    assert metadata.describe("t.scores") == "array of float32"
    start, end = built.keys["llama.eps"]
    assert metadata.offset("llama.eps") == end - 4
    assert start < metadata.offset("llama.eps")


def test_a_default_stands_in_for_a_missing_key_only(tmp_path: Path) -> None:
    metadata = keys_of(build({"k": scalar(raw.UINT32, 1)}), tmp_path)
    assert metadata.integer("absent", None) is None
    assert metadata.integer("absent", -5) == -5
    assert metadata.real("absent", 1.5) == 1.5
    assert metadata.boolean("absent", False) is False
    assert metadata.text("absent", "x") == "x"
    assert metadata.texts("absent", None) is None
    assert metadata.integers("absent", None) is None
    assert metadata.reals("absent", None) is None
    for getter in (metadata.text, metadata.boolean, metadata.texts, metadata.integers):
        with pytest.raises(FileFormatError, match="k: uint32, wanted"):
            getter("k", None)
    with pytest.raises(FileFormatError, match="absent: this key is missing"):
        metadata.real("absent")


@pytest.mark.parametrize(
    ("value", "read", "message"),
    [
        (scalar(raw.STRING, "7"), lambda m: m.integer("k"), "string, wanted an integer from 0 to"),
        (scalar(raw.BOOL, True), lambda m: m.integer("k"), "bool, wanted an integer"),
        (scalar(raw.FLOAT32, 7.0), lambda m: m.integer("k"), "float32, wanted an integer"),
        (scalar(raw.INT32, -1), lambda m: m.integer("k"), "-1, wanted an integer from 0 to"),
        (scalar(raw.UINT64, 2**63), lambda m: m.integer("k"), "9223372036854775808, wanted"),
        (scalar(raw.UINT32, 9), lambda m: m.integer("k", low=1, high=8), "9, wanted .* 1 to 8"),
        (array(raw.UINT32, [1]), lambda m: m.integer("k"), "array of uint32, wanted an integer"),
        (scalar(raw.UINT32, 1), lambda m: m.integers("k"), "uint32, wanted array of integers"),
        (array(raw.FLOAT32, [1.0]), lambda m: m.integers("k"), "array of float32, wanted array of"),
        (
            array(raw.UINT64, [1, 2**63]),
            lambda m: m.integers("k"),
            "element 1 is 9223372036854775808",
        ),
        (scalar(raw.FLOAT32, math.nan), lambda m: m.real("k"), "nan, wanted a finite number"),
        (scalar(raw.FLOAT64, -math.inf), lambda m: m.real("k"), "-inf, wanted a finite number"),
        (scalar(raw.STRING, "1"), lambda m: m.real("k"), "string, wanted a finite number"),
        (array(raw.FLOAT32, [0.0, math.inf]), lambda m: m.reals("k"), "element 1 is inf"),
        (array(raw.BOOL, [True]), lambda m: m.reals("k"), "array of bool, wanted array of finite"),
        (scalar(raw.UINT8, 1), lambda m: m.boolean("k"), "uint8, wanted bool"),
        (scalar(raw.UINT32, 1), lambda m: m.text("k"), "uint32, wanted string"),
        (array(raw.STRING, ["a"]), lambda m: m.text("k"), "array of string, wanted string"),
        (scalar(raw.STRING, "a"), lambda m: m.texts("k"), "string, wanted array of string"),
    ],
)
def test_a_value_of_another_type_or_range_is_refused_where_it_stands(
    tmp_path: Path, value: bytes, read: Callable[[Metadata], object], message: str
) -> None:
    metadata = keys_of(build({"first": scalar(raw.UINT8, 0), "k": value}), tmp_path)
    with pytest.raises(FileFormatError, match=message) as caught:
        read(metadata)
    assert caught.value.offset == metadata.offset("k")
    assert caught.value.hint
    assert caught.value.reason.startswith("k: ")


def test_the_time_for_a_vocabulary_grows_with_its_length_only(tmp_path: Path) -> None:
    def cost(count: int) -> float:
        tokens = array(raw.STRING, [f"token {number}" for number in range(count)])
        path = put(tmp_path, build({"tokens": tokens}))
        costs = []
        for _ in range(5):
            start = time.process_time()
            with GGUFFile.open(path) as file:
                assert len(file.metadata.texts("tokens")) == count
            costs.append(time.process_time() - start)
        return min(costs)

    assert cost(250_000) < 3 * cost(125_000)


def claim(length: int) -> bytes:
    return struct.pack("<Q", length)


@pytest.mark.parametrize("huge", [5000, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_no_count_or_length_is_believed_beyond_the_end_of_the_file(
    tmp_path: Path, huge: int
) -> None:
    value = scalar(raw.STRING, "v")
    text = struct.pack("<I", raw.STRING) + claim(huge) + b"v"
    cases = {
        "keys": (build({"k": value}, key_count=huge), 16),
        "tensors": (build({"k": value}, [Tensor("t")], tensor_count=huge), 8),
        "name of key": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + claim(huge) + bytes(99), 24),
        "k: the string": (build({"k": text}), 24 + 9 + 4),
        "numbers": (build({"k": array(raw.UINT64, [1], huge)}), 24 + 9 + 8),
        "bytes": (build({"k": array(raw.UINT8, [1], huge)}), 24 + 9 + 8),
        "strings": (build({"k": array(raw.STRING, ["a"], huge)}), 24 + 9 + 8),
        "one string": (
            build({"k": struct.pack("<IIQ", 9, 8, 2) + raw.string("a") + claim(huge) + b"b"}),
            24 + 9 + 16 + 9,
        ),
        "name of tensor": (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + claim(huge) + bytes(99),
            24,
        ),
    }
    for what, (data, offset) in cases.items():
        error = refusal(put(tmp_path, data))
        assert error.offset == offset, (what, error)
        assert str(huge) in error.reason or what == "one string", (what, error)


def test_a_header_is_bounded_in_a_huge_sparse_file_too(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    with open(path, "wb") as file:
        file.write(build({"k": array(raw.STRING, [], 2**30)}))
        file.truncate(2**33)
    assert f"at most {MAX_HEAD_BYTES}" in refusal(path).reason
    with open(path, "wb") as file:
        file.write(build({"k": struct.pack("<I", raw.STRING) + claim(2**32)}))
        file.truncate(2**33)
    assert f"{MAX_HEAD_BYTES} that a head may have" in refusal(path).reason


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([("k", scalar(raw.UINT8, 1)), ("k", scalar(raw.UINT8, 1))], "k: this key is there twice"),
        ([("", scalar(raw.STRING, "v"))], "name of key 0 of 1, '', is empty"),
        ([(b"k\xff", scalar(raw.UINT8, 1))], "is not UTF-8"),
        ([("k\n\x1b[31m", scalar(raw.UINT8, 1))], "holds characters that cannot be printed"),
        ([(b"k" * 65536, scalar(raw.UINT8, 1))], "has 65536 bytes, at most 65535"),
        ([("k", struct.pack("<I", 13) + bytes(8))], "k: type of value 13"),
        ([("k", struct.pack("<IIQ", 9, 13, 1) + bytes(8))], "k: type of value 13"),
        ([("k", struct.pack("<IIQ", 9, 9, 0))], "k: an array of arrays"),
        ([("k", struct.pack("<IB", raw.BOOL, 2))], "k: 2 is neither false (0) nor true (1)"),
        ([("k", struct.pack("<IIQ3B", 9, raw.BOOL, 3, 1, 0, 255))], "k: 255 is neither false"),
    ],
)
def test_metadata_that_contradict_the_format_are_refused(
    tmp_path: Path, keys: list[tuple[str | bytes, bytes]], message: str
) -> None:
    error = refusal(put(tmp_path, build(keys)))
    assert message in error.reason
    assert error.offset is not None


_INTEGERS = {
    raw.UINT8: (0, 2**8 - 1),
    raw.INT8: (-(2**7), 2**7 - 1),
    raw.UINT16: (0, 2**16 - 1),
    raw.INT16: (-(2**15), 2**15 - 1),
    raw.UINT32: (0, 2**32 - 1),
    raw.INT32: (-(2**31), 2**31 - 1),
    raw.UINT64: (0, 2**64 - 1),
    raw.INT64: (-(2**63), 2**63 - 1),
}
_ELEMENTS = {
    **{kind: st.integers(low, high) for kind, (low, high) in _INTEGERS.items()},
    raw.FLOAT32: st.floats(width=32, allow_nan=False),
    raw.FLOAT64: st.floats(allow_nan=False),
    raw.BOOL: st.booleans(),
    raw.STRING: st.text(st.characters(codec="utf-8"), max_size=20),
}
_NAMES = st.text(st.characters(codec="utf-8").filter(str.isprintable), min_size=1, max_size=12)
_VALUES = st.sampled_from(sorted(_ELEMENTS)).flatmap(
    lambda kind: st.one_of(
        st.tuples(st.just(kind), _ELEMENTS[kind]),
        st.tuples(st.just(kind), st.lists(_ELEMENTS[kind], max_size=8)),
    )
)


@settings(max_examples=200)
@given(st.dictionaries(_NAMES, _VALUES))
def test_metadata_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, tuple[int, object]]
) -> None:
    values.pop("general.alignment", None)
    values.pop("split.count", None)
    keys = {
        key: array(kind, value) if isinstance(value, list) else scalar(kind, value)
        for key, (kind, value) in values.items()
    }
    metadata = keys_of(build(keys), tmp_path_factory.mktemp("keys"))
    assert list(metadata) == list(values)
    for key, (_, value) in values.items():
        found = metadata[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=12), max_size=20))
def test_tokens_that_are_not_utf8_can_be_recovered_exactly(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    texts = keys_of(build({"k": array(raw.STRING, tokens)}), folder).texts("k")
    assert [text.encode("utf-8", "surrogateescape") for text in texts] == tokens
