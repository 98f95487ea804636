"""Read what precedes the data of a GGUF file: metadata, and where each tensor is.

    magic, version, number of tensors, number of keys       24 bytes
    for each key     its name, type and value               `Metadata`
    for each tensor  its name, shape, type and offset       the tensor table
    padding to `general.alignment`, then the data of the tensors, each padded likewise

Nothing in a file is trusted: a damaged one ends in a `FileFormatError` that names the byte, never
in a wild read or a huge allocation. The tensors must tile the data: no overlap, no gap, no rest,
and zeros as padding. Every known writer keeps to that, and it shows that the sizes of all types
were understood. A tensor with a dimension of zero is refused; one without dimensions is a single
value.
"""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from strata_nb.errors import FileFormatError
from strata_nb.formats import REMOVED, TensorType, tensor_bytes
from strata_nb.metadata import DAMAGED, MAX_KEYS, Cursor, Metadata, read_metadata

MAGIC = b"GGUF"
VERSIONS = (2, 3)
START_BYTES = 24  # magic, version and the two counts
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 64
MAX_TENSORS = 1 << 20  # far above any real file; bounds the time for a hostile one

# The least bytes of a key (name of one byte, type, value) and of a tensor (no dimensions).
_KEY_BYTES = 8 + 1 + 4 + 1
_ENTRY_BYTES = 8 + 1 + 4 + 4 + 8


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


class Shard(NamedTuple):
    """Hold one file open: its descriptor, its map, and what its table says."""

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


def read_shard(path: Path, number: int, undo: ExitStack) -> Shard:
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
    return Shard(path, handle, mapped, version, metadata, tensors)


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
