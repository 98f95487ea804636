"""A damaged header ends in a refusal that names a byte, or in what the damage did not touch."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf_bytes as raw
import numpy as np
import pytest
from gguf_bytes import Built, Tensor, array, layout, scalar

from strata_nb.errors import FileFormatError
from strata_nb.gguf import GGUFFile

ROUNDS = 1000  # for each kind of damage
MOST_BYTES = 1 << 20  # that a round may allocate; the file has 3 KiB

Spans = list[tuple[int, int]]
Damage = Callable[[random.Random, bytearray, int], Spans]


def small_file() -> Built:
    keys = {
        "general.architecture": scalar(raw.STRING, "llama"),
        "general.alignment": scalar(raw.UINT32, 32),
        "general.name": scalar(raw.STRING, "ein größeres Modell"),
        "llama.block_count": scalar(raw.UINT32, 2),
        "llama.rope.freq_base": scalar(raw.FLOAT32, 10000.0),
        "llama.long": scalar(raw.UINT64, 2**40),
        "llama.flag": scalar(raw.BOOL, True),
        "tokenizer.ggml.tokens": array(raw.STRING, ["<s>", "", "a", "\udce2\udc96", "Ġthe"] * 3),
        "tokenizer.ggml.scores": array(raw.FLOAT32, [0.0, -1.5, -1000.0] * 5),
        "tokenizer.ggml.token_type": array(raw.INT32, [3, 1, 1, 6, 1] * 3),
        "tokenizer.ggml.flags": array(raw.BOOL, [True, False, True]),
        "tokenizer.ggml.bytes": array(raw.UINT8, [1, 2, 250]),
    }
    tensors = [
        Tensor("token_embd.weight", (5, 32), 2),
        Tensor("output_norm.weight", (9,), 0),
        Tensor("blk.0.ffn_gate_exps.weight", (2, 3, 32), 8),
        Tensor("blk.0.attn_q.weight", (1, 256), 12),
        Tensor("rope_freqs.weight", (3, 1, 1, 5), 1),
    ]
    return layout(keys, tensors)


def place(rng: random.Random, end: int) -> int:
    """A position of the header, every eighth time in its first bytes, which decide the most."""
    return rng.randrange(24 if rng.random() < 0.125 else end)


def flip_bits(rng: random.Random, data: bytearray, end: int) -> Spans:
    places = [place(rng, end) for _ in range(rng.choice((1, 1, 2, 4)))]
    for position in places:
        data[position] ^= 1 << rng.randrange(8)
    return [(position, position + 1) for position in places]


def overwrite(rng: random.Random, data: bytearray, end: int) -> Spans:
    """Write what breaks arithmetic: extremes and small numbers of 1, 4 or 8 bytes."""
    width = rng.choice((1, 4, 8))
    number = rng.choice((0, 1, 2, 255, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1))
    position = place(rng, end - width)
    data[position : position + width] = (number % 256**width).to_bytes(width, "little")
    return [(position, position + width)]


def cut(rng: random.Random, data: bytearray, end: int) -> Spans:
    position = place(rng, end)
    length = min(rng.choice((1, 2, 4, 8, 32, rng.randrange(1, 200))), end - position)
    del data[position : position + length]
    return [(position, position + length)]


def insert(rng: random.Random, data: bytearray, end: int) -> Spans:
    position = place(rng, end)
    length = rng.choice((1, 2, 4, 8, 32, rng.randrange(1, 200)))
    data[position:position] = rng.choice((bytes(length), rng.randbytes(length)))
    return [(position, position)]


def duplicate(rng: random.Random, data: bytearray, end: int) -> Spans:
    """Insert a copy of some of the header itself, which parses further than noise does."""
    start, position = place(rng, end), place(rng, end)
    data[position:position] = data[start : start + rng.randrange(1, 100)]
    return [(position, position)]


def end_early(rng: random.Random, data: bytearray, end: int) -> Spans:
    position = rng.randrange(len(data))
    del data[position:]
    return [(position, len(data))]


def untouched(spans: dict[str, tuple[int, int]], damaged: Spans) -> list[str]:
    return [
        name
        for name, (start, end) in spans.items()
        if all(high <= start or low >= end for low, high in damaged)
    ]


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return type(one) is type(other) and one == other


def content(file: GGUFFile, name: str) -> tuple[object, ...]:
    """A tensor without its place: a header that grew by whole alignments moves the data with it."""
    info = file.tensors[name]
    return info.type, info.shape, info.size_bytes, file.raw(name).tobytes()


def read(path: Path) -> tuple[dict[str, object], dict[str, tuple[object, ...]]] | FileFormatError:
    try:
        with GGUFFile.open(path) as file:
            return dict(file.metadata), {name: content(file, name) for name in file.tensors}
    except FileFormatError as error:
        return error


@pytest.mark.parametrize("damage", [flip_bits, overwrite, cut, insert, duplicate, end_early])
def test_a_damaged_header_is_refused_with_a_byte_or_read_where_it_is_whole(
    tmp_path: Path, damage: Damage
) -> None:
    built = small_file()
    path = tmp_path / "m.gguf"
    path.write_bytes(built.data)
    original = read(path)
    assert isinstance(original, tuple)
    keys, tensors = original
    refused = 0
    tracemalloc.start()
    try:
        for seed in range(ROUNDS):
            rng = random.Random(seed)
            data = bytearray(built.data)
            damaged = damage(rng, data, built.data_start)
            path.write_bytes(data)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            found = read(path)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < MOST_BYTES, seed
            if isinstance(found, FileFormatError):
                refused += 1
                assert found.offset is not None, (seed, found)
                assert 0 <= found.offset <= len(data), (seed, found)
                assert found.hint, (seed, found)
            else:
                for key in untouched(built.keys, damaged):
                    assert same(found[0][key], keys[key]), (seed, key)
                for name in untouched(built.tensors, damaged):
                    assert found[1][name] == tensors[name], (seed, name)
    finally:
        tracemalloc.stop()
    assert refused > ROUNDS // 4
