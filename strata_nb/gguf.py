"""Open GGUF files, versions 2 and 3, little endian: metadata, and tensors as views of a memory map.

What a file says of itself is read and checked by `gguf_table.py`, of a split model's files by
`gguf_shards.py`.

The data stays in the file. If the file is truncated while it is open, the operating system ends the
process with SIGBUS at the next access to a view: replace a model by renaming, never in place. The
descriptors stay open until `close`, so who reads with `read_into` reads the same file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_nb.errors import FileFormatError
from strata_nb.gguf_shards import open_shards
from strata_nb.gguf_table import Shard, TensorInfo
from strata_nb.metadata import Metadata

__all__ = ["GGUFFile", "Metadata", "TensorInfo"]


class GGUFFile:
    """Hold a model's file open, or all files of a split one: `metadata`, `tensors`, `raw` bytes.

    Of a split model (NAME-00001-of-00003.gguf) any shard may be named, all are opened; `path`,
    `version` and `metadata` are the first shard's, `tensors` are in the order of the files.

    After `close` the metadata stay valid and `raw` is refused. Views that `raw` gave before may be
    read for as long as somebody holds them: each keeps its mapping alive.
    """

    def __init__(self, shards: list[Shard]) -> None:
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
            file = cls(open_shards(Path(path), undo))
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
