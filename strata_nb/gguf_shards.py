"""Open a model that may be split over several files, of which any may be named.

Shards are found by their names (NAME-00001-of-00003.gguf), and checked to be the whole of one
model.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

from strata_nb.errors import FileFormatError
from strata_nb.gguf_table import Shard, read_shard

MAX_SHARDS = 99999  # five digits in the names of the files

_SHARD_NAME = "{stem}-{number:05d}-of-{count:05d}.gguf"
_SHARD_PATTERN = re.compile(r"(?P<stem>.*)-\d{5}-of-\d{5}\.gguf", re.DOTALL)
_FETCH_ALL = "fetch all shards of the model again, from one place"


def open_shards(path: Path, undo: ExitStack) -> list[Shard]:
    """Read the file and, if it is one shard of several, all of them, in their order."""
    named = read_shard(path, 0, undo)
    count = named.metadata.integer("split.count", 1, high=MAX_SHARDS)
    if count <= 1:
        return [named]
    index = named.metadata.integer("split.no", high=count - 1)
    paths = _shard_paths(named, index, count)
    missing = [shard for shard in paths if not os.path.exists(shard)]
    if missing:
        raise FileFormatError(
            missing[0],
            None,
            f"does not exist; {len(missing)} of the {count} shards of this model are missing",
            hint=f"put all {count} into the directory of {path.name}",
        )
    if index:  # read again in its turn, for its tensors do not say yet which shard they are in
        named.handle.close()
    shards = [
        named if number == index == 0 else read_shard(shard, number, undo)
        for number, shard in enumerate(paths)
    ]
    _check_same_model(shards)
    return shards


def _shard_paths(named: Shard, index: int, count: int) -> list[Path]:
    """Return where all shards must be, from the name of shard `index` (from 0)."""
    match = _SHARD_PATTERN.fullmatch(named.path.name)
    stem = match["stem"] if match else named.path.stem
    names = [
        _SHARD_NAME.format(stem=stem, number=number, count=count) for number in range(1, count + 1)
    ]
    if names[index] != named.path.name:
        raise named.metadata.error(
            "split.no",
            f"{index} of {count} (from 0), so the name of this file must be like {names[index]}",
            "give all shards the names they were made with: the others are found by name",
        )
    return [named.path.with_name(name) for name in names]


def _check_same_model(shards: list[Shard]) -> None:
    """Refuse shards of different models, and shards that are not the whole of one.

    Later shards repeat few keys of the first or none. What they repeat must be equal.
    """
    first = shards[0].metadata
    first.integer("split.count")  # not yet asked for where the user named a later shard
    wanted = first.integer("split.tensors.count")
    owner: dict[str, Path] = {}
    for number, shard in enumerate(shards):
        metadata = shard.metadata
        if metadata.integer("split.no") != number:
            found = metadata.integer("split.no")
            raise metadata.error(
                "split.no", f"{found}, wanted {number} by the file's name", _FETCH_ALL
            )
        for key in ("split.count", "split.tensors.count", *metadata):
            if key in ("split.no", "general.alignment"):
                continue
            if not metadata.agrees(key, first):
                raise metadata.error(
                    key,
                    f"not the same as in {shards[0].path.name}: two models are mixed",
                    _FETCH_ALL,
                )
        for tensor in shard.tensors:
            if tensor.name in owner:
                raise FileFormatError(
                    shard.path,
                    None,
                    f"tensor {tensor.name!r} is also in {owner[tensor.name].name}",
                    hint=_FETCH_ALL,
                )
            owner[tensor.name] = shard.path
    if len(owner) != wanted:
        raise first.error(
            "split.tensors.count", f"{wanted}, but the shards hold {len(owner)} tensors", _FETCH_ALL
        )
