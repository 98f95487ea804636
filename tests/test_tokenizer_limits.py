"""The tokenizer's work and memory stay in proportion, also with a vocabulary made to do harm."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest
from vocab_files import (
    CONTROL,
    NORMAL,
    SYMBOLS,
    USER_DEFINED,
    VocabFiles,
    open_tokenizer,
    vocabulary,
    write_vocabulary,
)

from strata_nb.errors import FileFormatError
from strata_nb.text import sentencepiece
from strata_nb.text.vocabulary import MAX_TOKEN_BYTES
from strata_nb.tokenizer import Tokenizer

SPM_START = ["<unk>", "<s>", "</s>"]


def spm_file(path: Path, *texts: str, scores: list[float] | None = None) -> Path:
    tokens = [*SPM_START, *texts]
    kinds = [CONTROL] * 3 + [NORMAL] * len(texts)
    scores = [0.0] * 3 + (scores or [-float(i) for i in range(len(texts))])
    return write_vocabulary(path, tokens, model="llama", scores=scores, kinds=kinds)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("letter", ["a", "▁"])
def test_a_token_longer_than_the_limit_is_refused_with_its_number_and_length(
    model: str, letter: str, tmp_path: Path
) -> None:
    path = tmp_path / "v.gguf"
    tokens, each = ["a", "b", "c", letter], len(letter.encode())

    def write(length: int) -> Path:
        return write_vocabulary(
            path, [*tokens, letter * length], model=model, scores=[0.0] * 4 + [-1.0]
        )

    longest = MAX_TOKEN_BYTES // each
    open_tokenizer(write(longest))
    with pytest.raises(FileFormatError) as caught:
        open_tokenizer(write(longest + 1))
    assert f"token 4 is {each * (longest + 1):,} bytes long" in str(caught.value)
    assert f"at most {MAX_TOKEN_BYTES:,}" in str(caught.value)
    assert caught.value.offset is not None
    assert caught.value.hint
    with pytest.raises(FileFormatError, match=r"400,000|1,200,000"):
        open_tokenizer(write(400_000))


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "llama-spm"])
def test_real_tokens_are_far_below_the_limit(name: str, vocab_files: VocabFiles) -> None:
    tokenizer = vocab_files.tokenizer(name)
    longest = max(len(tokenizer.text(token)) for token in range(tokenizer.vocab_size))
    assert longest * 2 * 4 <= MAX_TOKEN_BYTES


def peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        open_tokenizer(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_tokens_inside_tokens_do_not_fill_the_memory(tmp_path: Path) -> None:
    # As a list of merges this took 1.4 GB; the file has 0.7 MB.
    path = spm_file(tmp_path / "v.gguf", "▁", *("a" * length for length in range(1, 1201)))
    assert peak_bytes(path) < 20 * path.stat().st_size
    tokenizer = open_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("a" * 5000)) == b"a" * 5000


def test_without_a_list_of_merges_the_tokens_are_the_same(
    vocab_files: VocabFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = vocab_files.tokenizer("llama-spm")
    monkeypatch.setattr(sentencepiece, "MAX_SPLIT_CHARACTERS", 0)
    monkeypatch.delattr(sentencepiece, "_by_ranks")  # it must not be asked
    with_queue = open_tokenizer(vocab_files.path("llama-spm"))
    for text in (
        "",
        "Hello, world",
        "  many    spaces ",
        "żółć 北京 🚀",
        "for i in range(10):\n    x",
    ):
        assert with_queue.encode(text) == usual.encode(text)


def test_the_trial_of_equal_scores_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    make = sentencepiece._by_leftmost

    def counting(*arguments: object) -> object:
        encode = make(*arguments)  # type: ignore[arg-type]
        return lambda text: encoded.append(len(text)) or encode(text)  # type: ignore[func-returns-value]

    monkeypatch.setattr(sentencepiece, "_by_leftmost", counting)
    for length in (16, 64, 65, 1000):
        encoded.clear()
        scores = [0.0, -1.0, -1.0]
        path = spm_file(tmp_path / "v.gguf", "▁", "▁▁", "▁" * length, scores=scores)
        tokenizer = open_tokenizer(path)
        assert sum(encoded) <= 10_000
        assert tokenizer.decode(tokenizer.encode(" " * 999)) == b" " * 999


def special_tokenizer(*special: str) -> Tokenizer:
    kinds = [NORMAL] * len(SYMBOLS) + [USER_DEFINED] * len(special)
    return Tokenizer(vocabulary([*SYMBOLS, *special], model="gpt2", kinds=kinds))


def encode_seconds(tokenizer: Tokenizer, text: str) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        tokenizer.encode(text)
        best = min(best, time.process_time() - start)
    return best


def test_the_time_grows_with_the_text_and_not_with_the_special_tokens_in_it() -> None:
    tokenizer = special_tokenizer(*(f"<u{number:05}>" for number in range(2000)))

    def seconds(count: int) -> float:
        return encode_seconds(tokenizer, "x".join(f"<u{number:05}>" for number in range(count)) * 4)

    assert seconds(2000) < 3 * seconds(1000)


def test_special_tokens_that_almost_stand_everywhere_cost_one_search_each() -> None:
    special = ["a" * length + "!" for length in range(1, 1000)]
    text = "a" * 4000
    start = time.process_time()
    assert not any(part in text for part in special)
    searches = time.process_time() - start
    assert encode_seconds(special_tokenizer(*special), text) < 20 * searches


def test_special_tokens_of_equal_length_go_by_their_numbers() -> None:
    tokenizer = special_tokenizer("bcd", "abc", "é!", "xx")
    first = len(SYMBOLS)
    a, d, e = (SYMBOLS.index(letter) for letter in "ade")
    assert tokenizer.encode("abcd") == [a, first]
    assert tokenizer.encode("abce") == [first + 1, e]
    assert tokenizer.encode("bcdabcd") == [first, a, first]
    assert tokenizer.encode("xxxd") == [first + 3, SYMBOLS.index("x"), d]
    assert tokenizer.encode("é!bcd") == [first + 2, first]
