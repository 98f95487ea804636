"""Write GGUF files byte by byte, so that tests can write what no honest writer would.

`build` makes a valid file from keys and tensors; whatever a test hands over as bytes, or overrides,
goes into the file as it is. `put`, `refusal` and `keys_of` write a file and open it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from strata_nb.errors import FileFormatError
from strata_nb.gguf import GGUFFile
from strata_nb.metadata import Metadata

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = (
    range(13)
)
_CODES = {
    UINT8: "B",
    INT8: "b",
    UINT16: "H",
    INT16: "h",
    UINT32: "I",
    INT32: "i",
    FLOAT32: "f",
    BOOL: "?",
    UINT64: "Q",
    INT64: "q",
    FLOAT64: "d",
}
# id: (values of a block, bytes of a block), enough for the tests
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144), 24: (1, 1)}


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: object) -> bytes:
    """A value with its type."""
    body = string(value) if kind == STRING else struct.pack("<" + _CODES[kind], value)  # type: ignore[arg-type]
    return struct.pack("<I", kind) + body


def array(kind: int, values: Sequence[object], count: int | None = None) -> bytes:
    """An array with its type; `count` overrides the number that it claims to hold."""
    count = len(values) if count is None else count
    head = struct.pack("<IIQ", ARRAY, kind, count)
    if kind == STRING:
        return head + b"".join(string(value) for value in values)  # type: ignore[arg-type]
    return head + struct.pack(f"<{len(values)}{_CODES[kind]}", *values)


@dataclass
class Tensor:
    """A tensor; `shape` in numpy's order. Without `data` it gets bytes made from its name."""

    name: str | bytes
    shape: tuple[int, ...] = (4, 32)
    type_id: int = 0
    data: bytes | None = None
    offset: int | None = None  # overrides the place that follows from the tensors before it
    dimensions: int | None = None  # overrides len(shape)

    def bytes(self) -> bytes:
        if self.data is not None:
            return self.data
        values, size = _BLOCKS[self.type_id]
        total = size
        for n in self.shape:
            total *= n
        seed = sum(string(self.name))
        return bytes((seed + i * 7) % 251 for i in range(total // values))


@dataclass
class Built:
    """The bytes of a file and where its parts stand: (start, end) by the name of key or tensor."""

    data: bytes
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    tensors: dict[str, tuple[int, int]] = field(default_factory=dict)
    header_end: int = 0  # where the padding before the data begins
    data_start: int = 0


def layout(
    keys: dict[str, bytes] | Sequence[tuple[str | bytes, bytes]] = (),
    tensors: Sequence[Tensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    key_count: int | None = None,
    tensor_count: int | None = None,
    pad_last: bool = True,
    tail: bytes = b"",
) -> Built:
    """Build a file; `alignment` is used, and must be among `keys` to be known to a reader."""
    pairs = list(keys.items()) if isinstance(keys, dict) else list(keys)
    out = bytearray(magic + struct.pack("<I", version))
    out += struct.pack("<Q", len(tensors) if tensor_count is None else tensor_count)
    out += struct.pack("<Q", len(pairs) if key_count is None else key_count)
    built = Built(b"")
    for name, value in pairs:
        start = len(out)
        out += string(name) + value
        built.keys[str(name)] = (start, len(out))
    offset = 0
    blobs = bytearray()
    for number, tensor in enumerate(tensors):
        start = len(out)
        shape = tensor.shape[::-1]
        dimensions = len(shape) if tensor.dimensions is None else tensor.dimensions
        out += string(tensor.name) + struct.pack("<I", dimensions)
        out += struct.pack(f"<{len(shape)}Q", *shape)
        out += struct.pack(
            "<IQ", tensor.type_id, offset if tensor.offset is None else tensor.offset
        )
        built.tensors[str(tensor.name)] = (start, len(out))
        blob = tensor.bytes()
        blobs += blob
        if pad_last or number < len(tensors) - 1:
            blobs += bytes(-len(blob) % alignment)
        offset += len(blob) + -len(blob) % alignment
    built.header_end = len(out)
    if tensors:
        out += bytes(-len(out) % alignment)
    built.data_start = len(out)
    built.data = bytes(out + blobs + tail)
    return built


def build(*args: object, **options: object) -> bytes:
    """The bytes of `layout`."""
    return layout(*args, **options).data  # type: ignore[arg-type]


def put(folder: Path, data: bytes, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def refusal(path: Path | str) -> FileFormatError:
    """Open a file that must be refused, and return how."""
    with pytest.raises(FileFormatError) as caught:
        GGUFFile.open(path)
    error = caught.value
    assert error.exit_status == 2
    assert error.hint, error.message
    return error


def keys_of(data: bytes, folder: Path) -> Metadata:
    with GGUFFile.open(put(folder, data)) as file:
        return file.metadata
