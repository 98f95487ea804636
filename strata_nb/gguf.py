"""Open GGUF files, versions 2 and 3, little endian: metadata, and tensors as views of a memory map.

    magic, version, number of tensors, number of keys       24 bytes
    for each key     its name, type and value               `Metadata`
    for each tensor  its name, shape, type and offset       the tensor table
    padding to `general.alignment`, then the data of the tensors, each padded likewise

Nothing in a file is trusted: a damaged one ends in a `FileFormatError` that names the byte, never
in a wild read or a huge allocation. The tensors must tile the data: no overlap, no gap, no rest,
and zeros as padding. Every known writer keeps to that, and it shows that the sizes of all types
were understood. A tensor with a dimension of zero is refused; one without dimensions is a single
value.

The data stays in the file. If the file is truncated while it is open, the operating system ends the
process with SIGBUS at the next access to a view: replace a model by renaming, never in place. The
descriptors stay open until `close`, so who reads with `read_into` reads the same file.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strata_nb.errors import FileFormatError
from strata_nb.formats import REMOVED, TensorType, tensor_bytes
from strata_nb.metadata import DAMAGED, MAX_KEYS, Cursor, Metadata, read_metadata

__all__ = ["GGUFFile", "Metadata", "TensorInfo"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
START_BYTES = 24  # magic, version and the two counts
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 64
MAX_TENSORS = 1 << 20  # far above any real file; bounds the time for a hostile one
MAX_SHARDS = 99999  # five digits in the names of the files

# The least bytes of a key (name of one byte, type, value) and of a tensor (no dimensions).
_KEY_BYTES = 8 + 1 + 4 + 1
_ENTRY_BYTES = 8 + 1 + 4 + 4 + 8

_SHARD_NAME = "{stem}-{number:05d}-of-{count:05d}.gguf"
_SHARD_PATTERN = re.compile(r"(?P<stem>.*)-\d{5}-of-\d{5}\.gguf", re.DOTALL)
_FETCH_ALL = "fetch all shards of the model again, from one place"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Say what a tensor is and where its bytes are.

    `shape` is in numpy's order, slowest dimension first, which is the file's reversed. `offset` is
    the absolute byte in shard number `shard`, counted from 0.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    shard: int
    offset: int
    size_bytes: int


class GGUFFile:
    """Hold a model's file open, or all files of a split one: `metadata`, `tensors`, `raw` bytes.

    Of a split model (NAME-00001-of-00003.gguf) any shard may be named, all are opened; `path`,
    `version` and `metadata` are the first shard's, `tensors` are in the order of the files.

    After `close` the metadata stay valid and `raw` is refused. Views that `raw` gave before may be
    read for as long as somebody holds them: each keeps its mapping alive.
    """

    def __init__(self, shards: list[_Shard]) -> None:
        first = shards[0]
        self.path: Path = first.path
        self.version: int = first.version
        self.metadata: Metadata = first.metadata
        self.shards: tuple[Path, ...] = tuple(shard.path for shard in shards)
        self.size_bytes: int = sum(len(shard.mapped) for shard in shards)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {tensor.name: tensor for shard in shards for tensor in shard.tensors}
        )
        self._maps: list[mmap.mmap] | None = [shard.mapped for shard in shards]
        self._handles = [shard.handle for shard in shards]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map the file, and the other shards of a split model; check all that precedes the data.

        FileFormatError if a file cannot be opened, is no GGUF file, is damaged or cut off, or if a
        shard is missing or belongs to another model.
        """
        with ExitStack() as undo:
            file = cls(_open_shards(Path(path), undo))
            undo.pop_all()
        return file

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`; FileFormatError if the file has none."""
        return self.metadata.text("general.architecture")

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor: uint8, 1-D, a read-only view of the map.

        FileFormatError if there is no such tensor, ValueError after `close`.
        """
        tensor, mapped = self._tensor(name)
        return np.frombuffer(mapped, np.uint8, tensor.size_bytes, tensor.offset)

    def read_into(self, out: NDArray[np.uint8], name: str, start: int = 0) -> None:
        """Fill contiguous uint8 `out` with the bytes of a tensor from byte `start` on.

        A plain read past the mapping: nothing stays mapped, and what another process cuts off
        meanwhile is an error here and not the end of the process. Any number of threads may call
        it, others run meanwhile. Raises as `raw` does, FileFormatError with the byte where the file
        ends or cannot be read, ValueError for bytes outside the tensor.
        """
        tensor, _ = self._tensor(name)
        if not 0 <= start <= start + out.size <= tensor.size_bytes:
            raise ValueError(
                f"{out.size} bytes from byte {start}: tensor {name!r} has {tensor.size_bytes}"
            )
        handle, path = self._handles[tensor.shard].fileno(), self.shards[tensor.shard]
        rest, position = out.data, tensor.offset + start
        while rest:
            try:
                count = os.preadv(handle, [rest], position)
            except OSError as error:
                raise FileFormatError(
                    path, position, f"{len(rest)} bytes cannot be read: {error.strerror}"
                ) from error
            if count == 0:
                raise FileFormatError(
                    path,
                    position,
                    f"ends within tensor {name!r}, of which {len(rest)} bytes were still wanted",
                    hint="the file was cut while it was open: fetch it again",
                )
            rest, position = rest[count:], position + count

    def descriptor(self, name: str) -> int:
        """Return the system's number of the file that a tensor is in; valid until `close`."""
        tensor, _ = self._tensor(name)
        return self._handles[tensor.shard].fileno()

    def forget_cached(self, name: str, start: int, size: int) -> None:
        """Let the system drop its copy of some bytes of a tensor from memory; they stay readable.

        Only whole pages go. Nothing happens where the system has no such call.
        """
        tensor, _ = self._tensor(name)
        if hasattr(os, "posix_fadvise"):
            handle = self._handles[tensor.shard].fileno()
            os.posix_fadvise(handle, tensor.offset + start, size, os.POSIX_FADV_DONTNEED)

    def _tensor(self, name: str) -> tuple[TensorInfo, mmap.mmap]:
        if self._maps is None:
            raise ValueError(f"{self.path} is closed, tensor {name!r} cannot be read")
        tensor = self.tensors.get(name)
        if tensor is None:
            raise FileFormatError(
                self.path,
                None,
                f"no tensor {name!r} among the {len(self.tensors)} of this model",
                hint="the file may be incomplete, or made for another architecture",
            )
        return tensor, self._maps[tensor.shard]

    def close(self) -> None:
        """Let go of the files. What no view needs is unmapped now, the rest with the last view."""
        self._maps = None
        for handle in self._handles:
            handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Shard(NamedTuple):
    path: Path
    handle: FileIO
    mapped: mmap.mmap
    version: int
    metadata: Metadata
    tensors: list[TensorInfo]


class _Entry(NamedTuple):
    """A row of the tensor table; `type_at` and `offset_at` are where two of its fields stand."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_at: int
    offset: int  # from the start of the data
    offset_at: int


def _read_shard(path: Path, number: int, undo: ExitStack) -> _Shard:
    """Map a file, leave in `undo` how to close it, and read all that precedes the data."""
    handle, mapped = _map(path, undo)
    cursor = Cursor(path, mapped)
    version = _read_version(cursor)
    tensor_count = cursor.count("tensors", _ENTRY_BYTES, MAX_TENSORS)
    metadata = read_metadata(cursor, cursor.count("keys", _KEY_BYTES, MAX_KEYS))
    alignment = _read_alignment(metadata)
    entries = _read_table(cursor, tensor_count)
    data_start = _round_up(cursor.position, alignment)
    tensors = [_place(cursor, entry, alignment, data_start, number) for entry in entries]
    _check_tiling(cursor, entries, tensors, alignment, data_start)
    return _Shard(path, handle, mapped, version, metadata, tensors)


def _map(path: Path, undo: ExitStack) -> tuple[FileIO, mmap.mmap]:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise FileFormatError(path, None, "is a directory", hint="name a .gguf file in it")
        if not stat.S_ISREG(mode):  # a pipe, for one, would block for ever when it is opened
            raise FileFormatError(
                path, None, "is not a regular file and cannot be mapped", hint="save it to disk"
            )
        handle = undo.enter_context(open(path, "rb", 0))  # noqa: SIM115 - `undo` closes
        if hasattr(os, "posix_fadvise"):  # threads that take turns look like no order to it
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        size_bytes = os.fstat(handle.fileno()).st_size
        if size_bytes == 0:
            raise FileFormatError(path, 0, "is empty (0 bytes)", hint=DAMAGED)
        mapped = mmap.mmap(handle.fileno(), size_bytes, access=mmap.ACCESS_READ)
        undo.callback(mapped.close)
        return handle, mapped
    except FileNotFoundError:
        raise FileFormatError(path, None, "does not exist", hint="check the path") from None
    except PermissionError:
        raise FileFormatError(
            path, None, "this user may not read it", hint=f"allow it: chmod u+r {path}"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise FileFormatError(
            path, None, f"cannot be opened: {error}", hint="check the path"
        ) from None


def _read_version(cursor: Cursor) -> int:
    magic = cursor.mapped[: len(MAGIC)]
    if magic != MAGIC[: len(magic)]:
        hint = "name a model file in the GGUF format"
        if magic == b"vers":
            hint = "this looks like a Git LFS pointer in place of the model: run git lfs pull"
        elif magic.startswith(b"<"):
            hint = "this looks like a web page in place of the model: fetch the file again"
        cursor.fail(0, f"starts with {magic!r}, wanted {MAGIC!r}", hint)
    if cursor.size < START_BYTES:
        cursor.fail(cursor.size, f"ends after {cursor.size} bytes, wanted {START_BYTES} or more")
    cursor.skip(len(MAGIC), "the magic")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        hint = "convert the model again, to GGUF version 3, little endian"
        if version and version & 0xFFFF == 0:
            cursor.fail(4, "a big-endian GGUF file, only little-endian ones can be read", hint)
        cursor.fail(4, f"GGUF version {version}, only versions 2 and 3 can be read", hint)
    return version


def _read_alignment(metadata: Metadata) -> int:
    key = "general.alignment"
    alignment = metadata.integer(key, DEFAULT_ALIGNMENT, high=2**64 - 1)
    wanted = f"wanted uint32, a power of two from 8 to {MAX_ALIGNMENT}"
    if key in metadata and metadata.describe(key) != "uint32":
        raise metadata.error(
            key, f"{alignment} of type {metadata.describe(key)}, {wanted}", DAMAGED
        )
    if alignment.bit_count() != 1 or not 8 <= alignment <= MAX_ALIGNMENT:
        raise metadata.error(key, f"{alignment}, {wanted}", DAMAGED)
    return alignment


def _read_table(cursor: Cursor, count: int) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    for number in range(count):
        start = cursor.position
        name = cursor.name(f"the name of tensor {number} of {count}", MAX_NAME_BYTES)
        if name in entries:
            cursor.fail(start, f"tensor {name!r} is there twice")
        dimensions_at = cursor.position
        dimensions = cursor.u32(f"tensor {name!r}: the number of dimensions")
        if dimensions > MAX_DIMENSIONS:
            cursor.fail(
                dimensions_at,
                f"tensor {name!r} has {dimensions} dimensions, at most {MAX_DIMENSIONS} can be",
            )
        shape = tuple(cursor.u64(f"tensor {name!r}: the shape") for _ in range(dimensions))[::-1]
        if 0 in shape:
            cursor.fail(dimensions_at, f"tensor {name!r} of shape {shape} has a dimension of zero")
        type_at = cursor.position
        type_id = cursor.u32(f"tensor {name!r}: the type")
        offset_at = cursor.position
        offset = cursor.u64(f"tensor {name!r}: the offset")
        entries[name] = _Entry(name, shape, type_id, type_at, offset, offset_at)
    _check_types(cursor, list(entries.values()))
    return list(entries.values())


def _check_types(cursor: Cursor, entries: list[_Entry]) -> None:
    """Refuse a type whose blocks have no known size; say which tensors have it."""
    known = set(TensorType) - REMOVED
    for entry in entries:
        if entry.type_id in known:
            continue
        removed = {kind.value: f"{kind.name}, removed from the format" for kind in REMOVED}
        names = [other.name for other in entries if other.type_id == entry.type_id]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        cursor.fail(
            entry.type_at,
            f"tensor type {entry.type_id} ({removed.get(entry.type_id, 'not known')}) "
            f"of {len(names)} tensors: {', '.join(names[:3])}{more}",
            f"get the model in another quantisation; the newest type known is {max(known).name}",
        )


def _place(
    cursor: Cursor, entry: _Entry, alignment: int, data_start: int, shard: int
) -> TensorInfo:
    """Turn a row of the table into a place within the file."""
    kind = TensorType(entry.type_id)
    what = f"tensor {entry.name!r} ({kind.name}, shape {entry.shape})"
    try:
        size_bytes = tensor_bytes(kind, entry.shape or (1,))
    except ValueError as error:
        cursor.fail(entry.type_at, f"{what}: {error}")
    if entry.offset % alignment:
        cursor.fail(entry.offset_at, f"{what}: offset {entry.offset} is no multiple of {alignment}")
    available = cursor.size - data_start
    if not (entry.offset <= available and size_bytes <= available - entry.offset):
        start = data_start + entry.offset
        cursor.fail(
            entry.offset_at,
            f"{what} lies at bytes {start} to {start + size_bytes}, the file has {cursor.size}",
        )
    return TensorInfo(entry.name, kind, entry.shape, shard, data_start + entry.offset, size_bytes)


def _check_tiling(
    cursor: Cursor,
    entries: list[_Entry],
    tensors: list[TensorInfo],
    alignment: int,
    data_start: int,
) -> None:
    """Check that the tensors follow each other and end with the file, in whatever order they are.

    Most writers pad the last tensor, some do not, so the file may have one of two sizes. That
    leaves room for data which is shifted by a few bytes; padding that is not zero shows it.
    """
    end, padded_end = cursor.position, data_start
    in_file_order = sorted(zip(tensors, entries, strict=True), key=lambda pair: pair[0].offset)
    for tensor, entry in in_file_order:
        if tensor.offset != padded_end:
            fault = "overlaps another" if tensor.offset < padded_end else "leaves a gap"
            cursor.fail(
                entry.offset_at,
                f"tensor {tensor.name!r} ({tensor.type.name}) {fault}: "
                f"it starts at byte {tensor.offset}, wanted {padded_end}",
            )
        _check_padding(cursor, end, padded_end)
        end = tensor.offset + tensor.size_bytes
        padded_end = _round_up(end, alignment)
    if cursor.size not in (end, padded_end):
        cursor.fail(
            end,
            f"the {len(tensors)} tensors end at byte {end} ({padded_end} with padding), "
            f"the file has {cursor.size}",
        )
    _check_padding(cursor, end, cursor.size)


def _check_padding(cursor: Cursor, start: int, end: int) -> None:
    padding = cursor.mapped[start:end]
    shift = len(padding) - len(padding.lstrip(b"\0"))
    if shift < len(padding):
        cursor.fail(
            start + shift, f"padding from byte {start} to {end} holds {padding[shift]}, wanted 0"
        )


def _round_up(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _open_shards(path: Path, undo: ExitStack) -> list[_Shard]:
    """Read the file and, if it is one shard of several, all of them, in their order."""
    named = _read_shard(path, 0, undo)
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
        named if number == index == 0 else _read_shard(shard, number, undo)
        for number, shard in enumerate(paths)
    ]
    _check_same_model(shards)
    return shards


def _shard_paths(named: _Shard, index: int, count: int) -> list[Path]:
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


def _check_same_model(shards: list[_Shard]) -> None:
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
