"""Unpack the real vocabularies of tests/data/vocab, and write small ones."""

from __future__ import annotations

import json
import lzma
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from strata_nb.gguf import GGUFFile
from strata_nb.text.pretokenizers import PreTokenizer
from strata_nb.text.vocabulary import TokenKind, Vocabulary
from strata_nb.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data" / "vocab"
BPE_VOCABULARIES = ("gpt-2", "llama-bpe", "qwen2", "qwen35")
VOCABULARIES = (*BPE_VOCABULARIES, "llama-spm")
# One name for each set of expressions.
PRE_TOKENIZERS = (
    *("default", "gpt-2", "starcoder", "smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "falcon"),
    *("deepseek-llm", "deepseek-coder", "deepseek-v3", "spark2_5", "bloom", "viking", "gpt-4o"),
    *("tekken", "bailingmoe", "seed-coder", "exaone-moe", "laguna", "ufakzeka", "minicpm5"),
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = (
    TokenKind.NORMAL,
    TokenKind.UNKNOWN,
    TokenKind.CONTROL,
    TokenKind.USER_DEFINED,
    TokenKind.BYTE,
)
# The characters that stand for the bytes in a BPE vocabulary, and the tokens that do in an SPM one.
SYMBOLS = [*map(chr, range(0x21, 0x7F)), *map(chr, (*range(0xA1, 0xAD), *range(0xAE, 0x100)))]
SYMBOLS += [chr(0x100 + i) for i in range(256 - len(SYMBOLS))]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def symbols(text: str) -> list[int]:
    """Return the ids of characters in a vocabulary that begins with SYMBOLS."""
    return [SYMBOLS.index(char) for char in text]


class VocabFiles:
    """Give paths of unpacked vocabularies, and their tokenizers, each made once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizers: dict[str, Tokenizer] = {}

    def path(self, name: str, pre_tokenizer: str | None = None) -> Path:
        """Return the file of a vocabulary, under another pre-tokenizer if one is named."""
        if name == "qwen35":  # the vocabulary of qwen2 under another name
            return self.path("qwen2", "qwen35")
        path = self._directory / f"{name}.{pre_tokenizer}.gguf"
        if not path.exists():
            content = lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes())
            path.write_bytes(_renamed(content, pre_tokenizer) if pre_tokenizer else content)
        return path

    def tokenizer(self, name: str) -> Tokenizer:
        if name not in self._tokenizers:
            with GGUFFile.open(self.path(name)) as file:
                self._tokenizers[name] = Tokenizer.from_gguf(file)
        return self._tokenizers[name]


@cache
def expected() -> dict[str, Any]:
    """Return what tools/oracle_vocabularies.py wrote."""
    content: dict[str, Any] = json.loads(lzma.decompress((DATA / "expected.json.xz").read_bytes()))
    return content


def cases(name: str) -> list[tuple[str, list[int]]]:
    """Return llama.cpp's own test texts for a vocabulary and their ids."""
    inputs = DATA / ("qwen35.inp" if name == "qwen35" else "common.inp")
    texts = inputs.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    assert texts.pop() == ""
    lines = (DATA / f"{name}.out").read_text().splitlines()
    ids = [[int(number) for number in line.split()] for line in lines]
    return list(zip(texts, ids, strict=True))


def write_vocabulary(
    path: Path,
    tokens: Sequence[str | bytes],
    *,
    model: str = "gpt2",
    pre: str | None = "gpt-2",
    merges: Sequence[str] | None = (),
    kinds: Sequence[int] | None = None,
    scores: Sequence[float] | None = None,
    ids: dict[str, int] | None = None,
    flags: dict[str, bool] | None = None,
    name: str | None = None,
) -> Path:
    """Write a file with a vocabulary only; `ids` and `flags` are keys without their prefix."""
    writer = gguf.GGUFWriter(path, "llama")
    if name is not None:
        writer.add_name(name)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([t if isinstance(t, bytes) else t.encode() for t in tokens])
    if merges:
        writer.add_token_merges(list(merges))
    elif merges is not None:  # the writer leaves empty arrays out
        writer.add_token_merges(["a b"])
    if kinds is not None:
        writer.add_token_types(list(kinds))
    if scores is not None:
        writer.add_token_scores(list(scores))
    for key, value in (ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    for key, flag in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{key}", flag)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def open_tokenizer(path: Path) -> Tokenizer:
    with GGUFFile.open(path) as file:
        return Tokenizer.from_gguf(file)


def vocabulary(
    texts: Sequence[str],
    *,
    model: str,
    merges: Sequence[str] = (),
    scores: Sequence[float] = (),
    kinds: Sequence[int] = (),
    unk_id: int | None = None,
    space_prefix: bool = False,
) -> Vocabulary:
    """Make a vocabulary without a file: no special ids, and words are whole texts."""
    count = len(texts)
    return Vocabulary(
        model=model,
        texts=list(texts),
        kinds=np.array(kinds or [TokenKind.NORMAL] * count, np.uint8),
        scores=np.array(scores or [0.0] * count),
        merges=list(merges),
        words=PreTokenizer(()),
        bos_id=None,
        eos_id=None,
        eot_id=None,
        pad_id=None,
        unk_id=unk_id,
        end_ids=frozenset(),
        add_bos=False,
        add_eos=False,
        space_prefix=space_prefix,
        strip_left=frozenset(),
        strip_right=frozenset(),
        warnings=[],
    )


def _renamed(content: bytes, pre_tokenizer: str) -> bytes:
    """Return the file with another value of tokenizer.ggml.pre (a string behind its type)."""
    key = b"tokenizer.ggml.pre"
    start = content.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4
    (length,) = struct.unpack_from("<Q", content, start)
    value = pre_tokenizer.encode()
    return content[:start] + struct.pack("<Q", len(value)) + value + content[start + 8 + length :]
