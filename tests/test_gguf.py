"""What the reader of GGUF files gives back, and which files it refuses."""

from __future__ import annotations

import gc
import os
import struct
from pathlib import Path

import gguf_bytes as raw
import numpy as np
import pytest
from gguf_bytes import Tensor, array, build, layout, put, refusal, scalar

from strata_nb.errors import FileFormatError
from strata_nb.formats import TensorType
from strata_nb.gguf import GGUFFile

# --- what a valid file gives


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("pad_last", [True, False])
def test_tensors_are_views_of_the_file_in_its_order(
    tmp_path: Path, version: int, pad_last: bool
) -> None:
    tensors = [
        Tensor("b", (3, 5, 32), 2),
        Tensor("a", (7,), 0),
        Tensor("scalar", (), 0, b"\0\0\x80?"),
        Tensor("c", (2, 256), 12),
    ]
    built = layout({}, tensors, version=version, pad_last=pad_last)
    path = put(tmp_path, built.data)
    with GGUFFile.open(str(path)) as file:
        assert (file.path, file.shards, file.version) == (path, (path,), version)
        assert file.size_bytes == len(built.data)
        assert list(file.tensors) == ["b", "a", "scalar", "c"]
        assert file.tensors["b"].shape == (3, 5, 32)
        assert file.tensors["b"].type is TensorType.Q4_0
        assert file.tensors["b"].size_bytes == 15 * 18
        assert file.tensors["b"].offset == built.data_start
        assert file.tensors["scalar"].shape == ()
        for tensor in tensors:
            view = file.raw(str(tensor.name))
            assert view.dtype == np.uint8
            assert view.ndim == 1
            assert not view.flags.writeable
            assert view.tobytes() == tensor.bytes()


def test_the_architecture_is_missed_only_when_asked_for(tmp_path: Path) -> None:
    with (
        GGUFFile.open(put(tmp_path, build())) as file,
        pytest.raises(FileFormatError, match=r"general\.architecture: this key is missing"),
    ):
        _ = file.architecture


def test_close_may_be_repeated_and_leaves_views_and_metadata_usable(tmp_path: Path) -> None:
    tensor = Tensor("t")
    file = GGUFFile.open(put(tmp_path, build({"k": array(raw.STRING, ["v"])}, [tensor])))
    view = file.raw("t")
    file.close()
    file.close()
    gc.collect()
    assert view.tobytes() == tensor.bytes()
    assert file.metadata.texts("k") == ["v"]
    with pytest.raises(ValueError, match="closed"):
        file.raw("t")


def test_any_bytes_of_a_tensor_can_be_read_past_the_map(tmp_path: Path) -> None:
    tensors = [Tensor("a", (3, 32), 2), Tensor("b", (5, 32), 2)]
    with GGUFFile.open(put(tmp_path, build({}, tensors))) as file:
        for name, start, size in (("b", 0, 90), ("b", 7, 11), ("b", 90, 0), ("a", 53, 1)):
            out = np.full(size, 255, np.uint8)
            file.read_into(out, name, start)
            np.testing.assert_array_equal(out, file.raw(name)[start : start + size])
        for start, size in ((-1, 3), (0, 91), (91, 0)):
            with pytest.raises(ValueError, match="tensor 'b' has 90"):
                file.read_into(np.empty(size, np.uint8), "b", start)
        with pytest.raises(FileFormatError, match="no tensor 'c'"):
            file.read_into(np.empty(1, np.uint8), "c")
    with pytest.raises(ValueError, match="is closed"):
        file.read_into(np.empty(1, np.uint8), "b")


def test_what_is_read_is_of_the_file_that_was_opened_also_when_another_took_its_name(
    tmp_path: Path,
) -> None:
    path = put(tmp_path, build({}, [Tensor("t", (4, 32), 0, bytes(512))]))
    with GGUFFile.open(path) as file:
        os.replace(put(tmp_path, build({}, [Tensor("t")]), "other"), path)
        out = np.full(512, 255, np.uint8)
        file.read_into(out, "t")
    assert not out.any()


def test_a_file_that_was_cut_meanwhile_is_refused_with_the_byte_it_ends_at(tmp_path: Path) -> None:
    path = put(tmp_path, build({}, [Tensor("t")]))
    with GGUFFile.open(path) as file:
        end = file.tensors["t"].offset + 100
        os.truncate(path, end)
        file.read_into(np.empty(100, np.uint8), "t")
        with pytest.raises(FileFormatError, match="412 bytes were still wanted") as caught:
            file.read_into(np.empty(512, np.uint8), "t")
    assert caught.value.offset == end


def test_a_read_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with GGUFFile.open(put(tmp_path, build({}, [Tensor("t")]))) as file:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(FileFormatError, match="cannot be read: Input/output error") as caught:
            file.read_into(np.empty(3, np.uint8), "t", 4)
        assert caught.value.offset == file.tensors["t"].offset + 4


def test_the_system_is_told_which_bytes_it_may_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, ...]] = []
    with GGUFFile.open(put(tmp_path, build({}, [Tensor("a"), Tensor("b")]))) as file:
        before = file.raw("b").tobytes()
        file.forget_cached("b", 8, 100)
        assert file.raw("b").tobytes() == before
        monkeypatch.setattr(os, "posix_fadvise", lambda _, *numbers: told.append(numbers))
        file.forget_cached("b", 8, 100)
        assert told == [(file.tensors["b"].offset + 8, 100, os.POSIX_FADV_DONTNEED)]
        monkeypatch.delattr(os, "posix_fadvise")
        file.forget_cached("b", 8, 100)
        GGUFFile.open(file.path).close()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_nothing_stays_mapped_after_the_last_view_or_a_refusal(tmp_path: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    path = put(tmp_path, build({}, [Tensor("t")]))
    file = GGUFFile.open(path)
    view = file.raw("t")
    assert mapped() == 1
    file.close()
    assert mapped() == 1
    del view
    assert mapped() == 0
    put(tmp_path, build({}, [Tensor("t")], tail=b"more"))
    error = refusal(path)
    assert mapped() == 0, error


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    with (
        GGUFFile.open(put(tmp_path, build({}, [Tensor("t")]))) as file,
        pytest.raises(FileFormatError, match=r"no tensor 'blk\.0\.attn_q\.weight' among the 1"),
    ):
        file.raw("blk.0.attn_q.weight")


# --- files that are no GGUF files


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.gguf").reason
    assert "is a directory" in refusal(tmp_path).reason
    assert "cannot be opened" in refusal("nul\0l.gguf").reason
    assert "cannot be opened" in refusal("x" * 5000).reason
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf").reason


def test_a_file_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, build())

    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("strata_nb.gguf_table.open", deny, raising=False)
    error = refusal(path)
    assert "may not read" in error.reason
    assert f"chmod u+r {path}" in error.hint


@pytest.mark.parametrize(
    ("data", "offset", "message"),
    [
        (b"", 0, "is empty"),
        (b"GGU", 3, "ends after 3 bytes, wanted 24"),
        (b"xyz", 0, "starts with b'xyz'"),
        (b"GGUF\x03\0\0\0", 8, "ends after 8 bytes"),
        (b"PK\x03\x04" + bytes(40), 0, "wanted b'GGUF'"),
        (build(version=1), 4, "GGUF version 1, only versions 2 and 3"),
        (build(version=4), 4, "GGUF version 4"),
        (build(version=0), 4, "GGUF version 0"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(99), 4, "big-endian"),
    ],
)
def test_a_file_that_starts_wrongly_is_refused(
    tmp_path: Path, data: bytes, offset: int, message: str
) -> None:
    error = refusal(put(tmp_path, data))
    assert error.offset == offset
    assert message in error.reason


def test_stand_ins_for_a_model_are_recognised(tmp_path: Path) -> None:
    assert (
        "git lfs pull"
        in refusal(put(tmp_path, b"version https://git-lfs.github.com/spec/v1\n")).hint
    )
    assert "web page" in refusal(put(tmp_path, b"<!DOCTYPE html><html></html>")).hint


# --- headers that contradict themselves


@pytest.mark.parametrize(
    "value",
    [
        scalar(raw.UINT32, 0),
        scalar(raw.UINT32, 3),
        scalar(raw.UINT32, 4),
        scalar(raw.UINT32, 48),
        scalar(raw.UINT32, 2**21),
        scalar(raw.UINT32, 2**31),
        scalar(raw.UINT64, 32),
        scalar(raw.UINT64, 2**63),
        scalar(raw.INT32, 32),
        scalar(raw.INT32, -32),
        scalar(raw.STRING, "32"),
        scalar(raw.FLOAT32, 32.0),
        array(raw.UINT32, [32]),
    ],
)
def test_an_alignment_that_is_no_power_of_two_in_range_is_refused(
    tmp_path: Path, value: bytes
) -> None:
    built = layout({"general.alignment": value}, [Tensor("t")])
    error = refusal(put(tmp_path, built.data))
    assert error.reason.startswith("general.alignment: ")
    assert error.offset is not None
    assert built.keys["general.alignment"][0] < error.offset < built.keys["general.alignment"][1]


@pytest.mark.parametrize("alignment", [8, 64, 2**20])
def test_every_alignment_in_range_is_followed(tmp_path: Path, alignment: int) -> None:
    tensors = [Tensor("a", (3,)), Tensor("b", (5,))]
    keys = {"general.alignment": scalar(raw.UINT32, alignment)}
    with GGUFFile.open(put(tmp_path, build(keys, tensors, alignment=alignment))) as file:
        assert [tensor.offset % alignment for tensor in file.tensors.values()] == [0, 0]
        for tensor in tensors:
            assert file.raw(str(tensor.name)).tobytes() == tensor.bytes()


# --- tensor tables


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([Tensor("t"), Tensor("t")], "tensor 't' is there twice"),
        ([Tensor("")], "name of tensor 0 of 1, '', is empty"),
        ([Tensor(b"t\xc3")], "is not UTF-8"),
        ([Tensor("t\0")], "holds characters that cannot be printed"),
        ([Tensor("t" * 65)], "has 65 bytes, at most 64"),
        ([Tensor("t", (1, 1, 1, 1, 1))], "'t' has 5 dimensions, at most 4"),
        ([Tensor("t", dimensions=2**31)], "'t' has 2147483648 dimensions, at most 4"),
        ([Tensor("t", (0, 32))], "'t' of shape (0, 32) has a dimension of zero"),
        ([Tensor("t", (2**63, 0))], "has a dimension of zero"),
        (
            [Tensor("t", (2**32, 2**32), data=bytes(64))],
            "(F32, shape (4294967296, 4294967296)) lies",
        ),
        ([Tensor("t", (2**63, 2, 1, 1), data=bytes(64))], "the file has"),
        ([Tensor("t", (2, 33), 2, bytes(64))], "33"),
        ([Tensor("t", offset=16)], "offset 16 is no multiple of 32"),
        ([Tensor("t", offset=2**64 - 32)], "the file has"),
        ([Tensor("t", offset=2**20)], "the file has"),
        ([Tensor("a"), Tensor("b", offset=0)], "tensor 'b' (F32) overlaps another"),
        ([Tensor("a"), Tensor("b", offset=480)], "tensor 'b' (F32) overlaps another"),
        (
            [Tensor("a"), Tensor("b", (4,), 0, bytes(64), offset=544), Tensor("c", offset=576)],
            "'b' (F32) leaves a gap",
        ),
        ([Tensor("a", (3, 32), data=bytes(512))], "the 1 tensors end at byte"),
    ],
)
def test_a_tensor_table_is_checked_before_the_data_is_touched(
    tmp_path: Path, tensors: list[Tensor], message: str
) -> None:
    error = refusal(put(tmp_path, build({}, tensors)))
    assert message in error.reason
    assert error.offset is not None


def test_tensors_may_lie_in_another_order_than_the_table(tmp_path: Path) -> None:
    first, second = Tensor("first"), Tensor("second")
    swapped = [
        Tensor("second", data=first.bytes(), offset=512),
        Tensor("first", data=second.bytes(), offset=0),
    ]
    with GGUFFile.open(put(tmp_path, build({}, swapped))) as file:
        assert list(file.tensors) == ["second", "first"]
        assert file.raw("first").tobytes() == first.bytes()
        assert file.raw("second").tobytes() == second.bytes()


@pytest.mark.parametrize("place", ["header", "middle", "end"])
def test_padding_that_is_not_zero_is_refused(tmp_path: Path, place: str) -> None:
    built = layout({}, [Tensor("a", (3,)), Tensor("b", (5,))])
    position = {
        "header": built.data_start - 1,
        "middle": built.data_start + 13,
        "end": len(built.data) - 1,
    }[place]
    data = bytearray(built.data)
    data[position] = 7
    error = refusal(put(tmp_path, bytes(data)))
    assert error.offset == position
    assert "holds 7, wanted 0" in error.reason


def test_data_shifted_by_the_length_of_the_last_padding_is_refused(tmp_path: Path) -> None:
    built = layout({}, [Tensor("a"), Tensor("b", (6,))])  # the padding has 8 bytes
    data, start = built.data, built.data_start
    assert built.header_end <= start - 8
    assert "padding" in refusal(put(tmp_path, data[: start - 8] + data[start:])).reason
    assert "padding" in refusal(put(tmp_path, data[:start] + bytes(8) + data[start:-8])).reason


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    error = refusal(put(tmp_path, build({}, [Tensor("t")], tail=bytes(32))))
    assert "the 1 tensors end at byte" in error.reason
    assert "the 0 tensors end at byte" in refusal(put(tmp_path, build(tail=b"x"))).reason


@pytest.mark.parametrize("type_id", [255, 43, 2**32 - 1, 4, 31])
def test_an_unknown_tensor_type_is_refused_with_the_tensors_that_have_it(
    tmp_path: Path, type_id: int
) -> None:
    names = [f"blk.{i}.ffn_gate_exps.weight" for i in range(5)]
    tensors = [Tensor("ok")] + [Tensor(name, (2, 4, 32), type_id, bytes(64)) for name in names]
    built = layout({}, tensors)
    error = refusal(put(tmp_path, built.data))
    assert f"tensor type {type_id} (" in error.reason
    assert "of 5 tensors" in error.reason
    assert ", ".join(names[:3]) + " and 2 more" in error.reason
    start, end = built.tensors[names[0]]
    assert error.offset == end - 12
    assert start < error.offset


def test_a_file_without_its_last_mebibyte_is_refused_with_tensor_type_and_numbers(
    tmp_path: Path,
) -> None:
    tensors = [Tensor("a"), Tensor("output.weight", (4096, 4096), 2, bytes(4096 * 4096 // 32 * 18))]
    built = layout({}, tensors)
    start = built.data_start + 512
    size = len(built.data) - 2**20
    error = refusal(put(tmp_path, built.data[:size]))
    assert "'output.weight' (Q4_0" in error.reason
    for number in (start, start + 4096 * 4096 // 32 * 18, size):
        assert str(number) in error.reason
    assert "cut off" in error.hint


def test_every_cut_of_a_small_file_is_refused(tmp_path: Path) -> None:
    whole = build({"k": array(raw.STRING, ["a", "b"])}, [Tensor("t", (2, 32), 8)], pad_last=False)
    for size in range(len(whole)):
        assert refusal(put(tmp_path, whole[:size])).offset is not None


# --- split models


# --- round trips


@pytest.mark.parametrize("alignment", [32, 64])
def test_files_of_the_gguf_package_are_read(tmp_path: Path, alignment: int) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "package.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("k.uint8", 200)
    writer.add_int8("k.int8", -100)
    writer.add_uint16("k.uint16", 60000)
    writer.add_int16("k.int16", -30000)
    writer.add_uint32("k.uint32", 2**32 - 1)
    writer.add_int32("k.int32", -(2**31))
    writer.add_uint64("k.uint64", 2**64 - 1)
    writer.add_int64("k.int64", -(2**63))
    writer.add_float32("k.float32", 0.5)
    writer.add_float64("k.float64", 0.1)
    writer.add_bool("k.bool", True)
    writer.add_string("k.string", "größer")
    writer.add_array("k.strings", ["a", "ß", ""])
    writer.add_array("k.integers", [1, -2])
    writer.add_array("k.reals", [0.25, 1.5])
    writer.add_array("k.bools", [True, False])
    rng = np.random.default_rng(1)
    tensors = {
        "vector": rng.standard_normal(7).astype(np.float32),
        "matrix": rng.standard_normal((3, 5)).astype(np.float16),
        "stack": rng.standard_normal((2, 3, 5)).astype(np.float32),
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    quantised = rng.integers(0, 256, (3, 36), np.uint8)
    writer.add_tensor("quantised", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GGUFFile.open(path) as file:
        assert file.architecture == "llama"
        metadata = file.metadata
        assert metadata["k.uint8"] == 200
        assert metadata["k.int8"] == -100
        assert metadata["k.uint16"] == 60000
        assert metadata["k.int16"] == -30000
        assert metadata.integer("k.uint32", high=2**32) == 2**32 - 1
        assert metadata["k.int32"] == -(2**31)
        assert metadata["k.uint64"] == 2**64 - 1
        assert metadata.integer("k.int64", low=-(2**63)) == -(2**63)
        assert metadata.real("k.float32") == 0.5
        assert metadata.real("k.float64") == 0.1
        assert metadata.boolean("k.bool") is True
        assert metadata.text("k.string") == "größer"
        assert metadata.texts("k.strings") == ["a", "ß", ""]
        assert metadata.integers("k.integers").tolist() == [1, -2]
        assert metadata.reals("k.reals").tolist() == [0.25, 1.5]
        assert list(metadata["k.bools"]) == [True, False]  # type: ignore[call-overload]
        for name, tensor in tensors.items():
            assert file.tensors[name].shape == tensor.shape
            np.testing.assert_array_equal(
                file.raw(name).view(tensor.dtype).reshape(tensor.shape), tensor
            )
        assert file.tensors["quantised"].shape == (3, 64)
        assert file.tensors["quantised"].type is TensorType.Q4_0
        assert all(tensor.offset % alignment == 0 for tensor in file.tensors.values())
        np.testing.assert_array_equal(file.raw("quantised").reshape(3, 36), quantised)
