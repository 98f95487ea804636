"""The file that `perplexity --save-logits` writes and `--kl-base` reads.

Little-endian, nothing between the parts:

    magic       8 bytes, b"STRATALG"
    version     uint32, 1
    vocab       uint32, logits of a row
    length      uint32, tokens of a chunk
    count       uint32, chunks
    checksum    uint32, CRC-32 of all of the above and of the ids
    ids         uint32 (count * length), the text
    count times
      logits    float32 (rows, vocab), those that are scored; `rows` follows from `length`
      checksum  uint32, CRC-32 of these logits

The size follows from the four numbers and is compared with the file's before anything of that size
is read; every byte is under one of the checksums. The file is written from front to end, so that a
pipe will do. An archive of arrays (.npz) was rejected: its libraries answer damage with a dozen
kinds of exception, and must be kept from unpacking more than the file is long.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from strata_nb.errors import FileFormatError
from strata_nb.perplexity import Chunks, Floats

MAGIC = b"STRATALG"
VERSION = 1

_NUMBERS = struct.Struct("<8sIIII")
_CHECKSUM = struct.Struct("<I")
_START = _NUMBERS.size + _CHECKSUM.size  # of the ids


class LogitsWriter:
    """Write a logits file to `stream`: the text at once, then chunk by chunk what is scored."""

    def __init__(self, stream: BinaryIO, chunks: Chunks, vocab: int) -> None:
        self._stream = stream
        numbers = _NUMBERS.pack(MAGIC, VERSION, vocab, chunks.length, chunks.count)
        ids = np.asarray(chunks.ids, "<u4").tobytes()
        stream.write(numbers)
        stream.write(_CHECKSUM.pack(zlib.crc32(ids, zlib.crc32(numbers))))
        stream.write(ids)

    def add(self, logits: Floats) -> None:
        """Append the scored rows (rows, vocab) of the next chunk."""
        content = np.ascontiguousarray(logits, "<f4").data
        self._stream.write(content)
        self._stream.write(_CHECKSUM.pack(zlib.crc32(content)))


class LogitsReader:
    """Read a logits file; FileFormatError for anything else, and for a file that is damaged.

    chunks, vocab    the text as it was cut, and the number of logits of a row
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with ExitStack() as undo:
            self._file = undo.enter_context(self._open())
            self.vocab, self.chunks = self._read_text()
            undo.pop_all()

    def rows(self, number: int) -> Floats:
        """Return the logits (rows, vocab) of a chunk."""
        rows, offset = self.chunks.rows, self._chunk_offset(number)
        logits = np.empty((rows, self.vocab), "<f4")
        self._file.seek(offset)
        read = self._file.readinto(logits.data)  # type: ignore[attr-defined]
        stored = self._file.read(_CHECKSUM.size)
        if read != logits.nbytes or stored != _CHECKSUM.pack(zlib.crc32(logits.data)):
            raise self._refuse(
                offset, f"the logits of chunk {number + 1} of {self.chunks.count} are damaged"
            )
        return logits.astype(np.float32, copy=False)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> LogitsReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> BinaryIO:
        if self._path.exists() and not self._path.is_file():
            raise self._refuse(None, "not a regular file")  # opening a pipe could wait forever
        try:
            return self._path.open("rb")
        except OSError as error:
            raise self._refuse(None, f"cannot be opened: {error.strerror}") from None

    def _read_text(self) -> tuple[int, Chunks]:
        """Read and check all that precedes the logits; return the vocabulary and the text."""
        size = os.fstat(self._file.fileno()).st_size
        numbers = self._file.read(_NUMBERS.size)
        if numbers[: len(MAGIC)] != MAGIC:
            raise self._refuse(0, f"not a logits file: begins with {numbers[: len(MAGIC)]!r}")
        stored = self._file.read(_CHECKSUM.size)
        if len(stored) != _CHECKSUM.size:
            raise self._refuse(size, f"ends within its header, after {size} bytes")
        _, version, vocab, length, count = _NUMBERS.unpack(numbers)
        if version != VERSION:
            raise self._refuse(len(MAGIC), f"version {version}, this program reads {VERSION}")
        if vocab < 1 or length < 2 or count < 1:
            raise self._refuse(
                len(MAGIC) + 4, f"{count} chunks of {length} tokens, {vocab} logits a row"
            )
        rows = Chunks([], length).rows
        text_bytes = 4 * count * length
        expected = _START + text_bytes + count * (4 * rows * vocab + _CHECKSUM.size)
        if size != expected:
            raise self._refuse(
                min(size, expected),
                f"{size} bytes, but {count} chunks of {length} tokens with {vocab} logits a row "
                f"take {expected}",
            )
        ids = self._file.read(text_bytes)
        if stored != _CHECKSUM.pack(zlib.crc32(ids, zlib.crc32(numbers))):
            raise self._refuse(_NUMBERS.size, "the header or the text is damaged")
        return vocab, Chunks(np.frombuffer(ids, "<u4").tolist(), length)

    def _chunk_offset(self, number: int) -> int:
        chunk_bytes = 4 * self.chunks.rows * self.vocab + _CHECKSUM.size
        return _START + 4 * len(self.chunks.ids) + number * chunk_bytes

    def _refuse(self, offset: int | None, message: str) -> FileFormatError:
        return FileFormatError(
            self._path, offset, message, hint="--save-logits of another run writes such a file"
        )
