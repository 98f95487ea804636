"""Carry metadata from one GGUF file to another, and copy files with other keys and tensors.

The writer of the `gguf` package takes values with their types, and text as UTF-8; a token need not
be UTF-8. `entry_of` gives a key of a file in the form that the writer takes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from strata_nb.gguf import GGUFFile
from strata_nb.metadata import Metadata


class Entry(NamedTuple):
    """Hold a metadata value with its type, and that of its elements if it is an array."""

    value: Any
    type: GGUFValueType
    of: GGUFValueType | None = None


def entry_of(metadata: Metadata, key: str) -> Entry:
    """Return a key of a file: the same bytes again once it is written."""
    described = metadata.describe(key)  # "uint32", "array of string", ...
    kind = GGUFValueType[described.removeprefix("array of ").upper()]
    value: Any = metadata[key]
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif isinstance(value, str):
        value = _bytes(value)
    elif isinstance(value, list):
        value = [_bytes(text) for text in value]
    if described.startswith("array of "):
        return Entry(value, GGUFValueType.ARRAY, kind)
    return Entry(value, kind)


def add_entry(writer: GGUFWriter, key: str, entry: Entry) -> None:
    """Give the writer a key."""
    writer.add_key_value(key, entry.value, entry.type, entry.of)


def rewrite(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    keys: Mapping[str, tuple[Any, GGUFValueType] | None],
    tensors: Mapping[str, npt.NDArray[np.generic] | None],
) -> None:
    """Copy a GGUF file with other keys (value and type) and F32 tensors; None leaves one out.

    A list becomes an array of the type.
    """
    with GGUFFile.open(source) as file:
        architecture = keys.get("general.architecture") or (file.architecture, None)
        writer = GGUFWriter(Path(target), architecture[0])
        for key in (*file.metadata, *(key for key in keys if key not in file.metadata)):
            if key == "general.architecture":
                continue  # the writer itself adds it
            if key not in keys:
                add_entry(writer, key, entry_of(file.metadata, key))
            elif (given := keys[key]) is not None:
                value, kind = given
                is_array = isinstance(value, list)
                entry = Entry(value, GGUFValueType.ARRAY, kind) if is_array else Entry(value, kind)
                add_entry(writer, key, entry)
        for name, info in file.tensors.items():
            if name not in tensors:
                raw = file.raw(name).reshape(*info.shape[:-1], -1)
                writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType(int(info.type)))
        for name, values in tensors.items():
            if values is not None:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
