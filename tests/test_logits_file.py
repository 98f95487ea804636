"""A logits file gives back what was written, and is refused wherever a byte of it is damaged."""

from __future__ import annotations

import gc
import io
import os
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strata_nb.commands.logits_file import LogitsReader, LogitsWriter
from strata_nb.errors import FileFormatError
from strata_nb.perplexity import Chunks

VOCAB = 3
CHUNKS = Chunks([7, 1, 2, 3, 4, 5, 6, 2**31, 9, 10, 11, 12], 6)
ROWS = np.arange(2 * 2 * VOCAB, dtype=np.float32).reshape(2, 2, VOCAB) - 5.5
ROUNDS = 300  # for each kind of damage
MOST_BYTES = 1 << 20  # that a refusal may allocate; the file has 140 bytes


def content() -> bytes:
    stream = io.BytesIO()
    writer = LogitsWriter(stream, CHUNKS, VOCAB)
    for rows in ROWS:
        writer.add(rows)
    return stream.getvalue()


def refusal(path: Path, data: bytes | bytearray) -> FileFormatError | None:
    path.write_bytes(data)
    try:
        with LogitsReader(path) as file:
            for number in range(file.chunks.count):
                file.rows(number)
    except FileFormatError as error:
        return error
    return None


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "base"
    path.write_bytes(content())
    with LogitsReader(path) as file:
        assert (file.vocab, file.chunks) == (VOCAB, CHUNKS)
        np.testing.assert_array_equal([file.rows(1), file.rows(0)], ROWS[::-1])
        assert file.rows(0).dtype == np.float32


def test_every_flipped_bit_is_refused_with_the_file_and_a_byte_of_it(tmp_path: Path) -> None:
    data = bytearray(content())
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        error = refusal(tmp_path / "base", data)
        data[bit // 8] ^= 1 << bit % 8
        assert error is not None, bit
        assert error.path == str(tmp_path / "base")
        assert error.offset is not None
        assert 0 <= error.offset <= len(data)
        assert error.hint


def overwrite(rng: random.Random, data: bytearray) -> None:
    width = rng.choice((1, 4, 8))
    number = rng.choice((0, 1, 2, 255, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1))
    at = rng.randrange(len(data) - width)
    data[at : at + width] = (number % 256**width).to_bytes(width, "little")


def cut(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 4, 8, 40))]


def insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 40)))


def end_early(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


@pytest.mark.parametrize("damage", [overwrite, cut, insert, end_early])
def test_any_damage_is_refused_in_little_memory(
    tmp_path: Path, damage: Callable[[random.Random, bytearray], None]
) -> None:
    whole = content()
    tracemalloc.start()
    try:
        for seed in range(ROUNDS):
            data = bytearray(whole)
            damage(random.Random(seed), data)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            error = refusal(tmp_path / "base", data)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < MOST_BYTES, seed
            assert (error is None) == (data == whole), seed
    finally:
        tracemalloc.stop()
    gc.collect()  # a file left open would warn, and so fail


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [
        ((1, 2**32 - 1, 2**32 - 1, 2**32 - 1), "take "),
        ((1, 0, 6, 0), "0 chunks of 6 tokens, 0 logits a row"),
        ((1, 3, 1, 1), "chunks of 1 tokens"),
        ((2, 3, 6, 1), "version 2, this program reads 1"),
    ],
)
def test_numbers_that_cannot_be_are_refused_also_under_a_right_checksum(
    tmp_path: Path, numbers: tuple[int, ...], cause: str
) -> None:
    head = struct.pack("<8s4I", b"STRATALG", *numbers)
    error = refusal(tmp_path / "base", head + struct.pack("<I", zlib.crc32(head)))
    assert error is not None
    assert cause in error.message


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        with pytest.raises(FileFormatError, match=r"regular file|cannot be opened"):
            LogitsReader(tmp_path / name)


def test_another_file_is_refused_as_what_it_begins_with(tmp_path: Path) -> None:
    error = refusal(tmp_path / "base", b"GGUF\x03\x00\x00\x00" + bytes(200))
    assert error is not None
    assert "not a logits file: begins with b'GGUF" in error.message
