"""A split model is one model, or it is refused."""

from __future__ import annotations

from pathlib import Path

import gguf_bytes as raw
import numpy as np
import pytest
from gguf_bytes import Tensor, build, refusal, scalar

from strata_nb.errors import FileFormatError
from strata_nb.gguf import GGUFFile


def shards_of(
    count: int = 3, *, name: str = "model", total: int | None = None
) -> list[tuple[dict[str, bytes], list[Tensor]]]:
    shards = []
    for number in range(count):
        keys = {"general.name": scalar(raw.STRING, name)} if number == 0 else {}
        keys["split.no"] = scalar(raw.UINT16, number)
        keys["split.count"] = scalar(raw.UINT16, count)
        keys["split.tensors.count"] = scalar(raw.INT32, count if total is None else total)
        shards.append((keys, [Tensor(f"{name}.{number}")]))
    return shards


def write_shards(
    folder: Path, shards: list[tuple[dict[str, bytes], list[Tensor]]], stem: str = "m"
) -> list[Path]:
    paths = [
        folder / f"{stem}-{number:05d}-of-{len(shards):05d}.gguf"
        for number in range(1, len(shards) + 1)
    ]
    for path, (keys, tensors) in zip(paths, shards, strict=True):
        path.write_bytes(build(keys, tensors))
    return paths


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_shard_opens_the_whole_model(tmp_path: Path, named: int) -> None:
    shards = shards_of()
    paths = write_shards(tmp_path, shards)
    with GGUFFile.open(paths[named]) as file:
        assert file.path == paths[0]
        assert file.shards == tuple(paths)
        assert file.size_bytes == sum(path.stat().st_size for path in paths)
        assert list(file.tensors) == ["model.0", "model.1", "model.2"]
        assert [tensor.shard for tensor in file.tensors.values()] == [0, 1, 2]
        assert file.metadata.text("general.name") == "model"
        assert file.metadata.unread("split.") == []
        for _, (tensor,) in shards:
            assert file.raw(str(tensor.name)).tobytes() == tensor.bytes()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, shards_of())
    paths[1].unlink()
    for named in (paths[0], paths[2]):
        error = refusal(named)
        assert error.path == str(paths[1])
        assert "1 of the 3 shards of this model are missing" in error.reason


def test_a_renamed_shard_is_told_its_name(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, shards_of())
    renamed = paths[0].rename(tmp_path / "mine.gguf")
    assert "mine-00001-of-00003.gguf" in refusal(renamed).reason
    swapped = paths[1].rename(tmp_path / "m-00001-of-00003.gguf")
    assert "m-00002-of-00003.gguf" in refusal(swapped).reason


def change(folder: Path, number: int, **keys: bytes | None) -> FileFormatError:
    shards = shards_of()
    for key, value in keys.items():
        if value is None:
            del shards[number][0][key.replace("_", ".")]
        else:
            shards[number][0][key.replace("_", ".")] = value
    return refusal(write_shards(folder, shards)[0])


def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    error = change(tmp_path, 1, split_no=scalar(raw.UINT16, 2))
    assert "split.no: 2, wanted 1" in error.reason
    error = change(tmp_path, 2, split_count=scalar(raw.UINT16, 4))
    assert error.path.endswith("m-00003-of-00003.gguf")
    assert "split.count: not the same as in m-00001-of-00003.gguf" in error.reason
    error = change(tmp_path, 2, split_tensors_count=scalar(raw.INT32, 9))
    assert "split.tensors.count: not the same" in error.reason
    error = change(tmp_path, 1, general_name=scalar(raw.STRING, "another"))
    assert "general.name: not the same" in error.reason
    assert error.offset is not None
    assert "split.no: this key is missing" in change(tmp_path, 1, split_no=None).reason
    assert "split.tensors.count: this key is missing" in (
        change(tmp_path, 0, split_tensors_count=None).reason
    )
    assert "split.no: 3, wanted an integer from 0 to 2" in (
        change(tmp_path, 0, split_no=scalar(raw.UINT16, 3)).reason
    )


def test_shards_of_two_models_with_equal_counts_are_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, shards_of(total=4))
    assert "split.tensors.count: 4, but the shards hold 3" in refusal(paths[0]).reason
    twice = shards_of()
    twice[2][1][0].name = "model.0"
    error = refusal(write_shards(tmp_path, twice)[0])
    assert "tensor 'model.0' is also in m-00001-of-00003.gguf" in error.reason


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_split_files_of_the_gguf_package_are_read(tmp_path: Path, small_first_shard: bool) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(
        tmp_path / "m.gguf", "llama", split_max_tensors=2, small_first_shard=small_first_shard
    )
    tensors = {f"t{i}": np.full((i + 1, 3), i, np.float32) for i in range(5)}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.glob("m-*.gguf"))
    assert len(paths) == 3 + small_first_shard
    for named in paths:
        with GGUFFile.open(named) as file:
            assert file.architecture == "llama"
            assert file.shards == tuple(paths)
            assert list(file.tensors) == list(tensors)
            for name, tensor in tensors.items():
                np.testing.assert_array_equal(
                    file.raw(name).view(np.float32).reshape(tensor.shape), tensor
                )
