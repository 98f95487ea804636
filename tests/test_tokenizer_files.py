"""The tokenizer of files that are odd or damaged: an error, or a warning and the rest works."""

from __future__ import annotations

from pathlib import Path

import pytest
from vocab_files import (
    BYTE,
    CONTROL,
    NORMAL,
    SYMBOLS,
    open_tokenizer,
    symbols,
    vocabulary,
    write_vocabulary,
)

from strata_nb.errors import FileFormatError
from strata_nb.tokenizer import Tokenizer


def test_a_missing_or_unknown_pre_tokenizer_is_the_default_one_with_a_warning(
    tmp_path: Path,
) -> None:
    default = write_vocabulary(tmp_path / "d.gguf", SYMBOLS, pre="default")
    assert open_tokenizer(default).warnings == []
    for number, (pre, words) in enumerate(((None, "names no"), ("futuristic", "'futuristic'"))):
        path = write_vocabulary(tmp_path / f"{number}.gguf", SYMBOLS, pre=pre)
        tokenizer = open_tokenizer(path)
        assert len(tokenizer.warnings) == 1
        assert words in tokenizer.warnings[0]
        assert "\n" not in tokenizer.warnings[0]
        assert tokenizer.encode("12345 ok") == open_tokenizer(default).encode("12345 ok")


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "no_vocab", "gemma4"])
def test_other_kinds_of_tokenizers_are_refused_by_name(model: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", SYMBOLS, model=model)
    with pytest.raises(FileFormatError, match=repr(model)) as caught:
        open_tokenizer(path)
    assert "gpt2" in caught.value.hint
    assert "llama" in caught.value.hint
    assert caught.value.offset is not None


def refusal(path: Path) -> FileFormatError:
    with pytest.raises(FileFormatError) as caught:
        open_tokenizer(path)
    return caught.value


@pytest.mark.parametrize("count", [1, 255, 257])
def test_arrays_of_other_lengths_than_the_tokens_are_refused(count: int, tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    error = refusal(write_vocabulary(path, SYMBOLS, kinds=[1] * count))
    assert f"token_type: holds {count} values for 256 tokens" in str(error)
    assert error.offset is not None
    error = refusal(write_vocabulary(path, SYMBOLS, scores=[1.0] * count))
    assert f"scores: holds {count} values for 256 tokens" in str(error)
    error = refusal(write_vocabulary(path, SYMBOLS, scores=[1.0] * count, model="llama"))
    assert f"scores: holds {count} values for 256 tokens" in str(error)


@pytest.mark.parametrize("kind", [7, 77])
def test_unknown_types_of_tokens_are_refused(kind: int, tmp_path: Path) -> None:
    kinds = [1] * 255 + [kind]
    error = refusal(write_vocabulary(tmp_path / "v.gguf", SYMBOLS, kinds=kinds))
    assert f"token 255 is of type {kind}" in str(error)


@pytest.mark.parametrize("text", ["<0x4>", "<0xGG>", "A", "<0x41>>"])
def test_a_byte_token_that_names_no_byte_is_refused(text: str, tmp_path: Path) -> None:
    error = refusal(
        write_vocabulary(
            tmp_path / "v.gguf", ["a", text], model="llama", scores=[0, 0], kinds=[NORMAL, BYTE]
        )
    )
    assert f"token 1 stands for a byte, and its text is {text!r}" in str(error)


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown"])
def test_a_special_id_outside_the_vocabulary_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    error = refusal(write_vocabulary(path, SYMBOLS, ids={f"{name}_token_id": 256}))
    assert f"{name}_token_id: is 256, and there are 256 tokens" in str(error)
    assert error.offset is not None
    write_vocabulary(path, SYMBOLS, ids={f"{name}_token_id": 2**32 - 1})  # -1: there is none
    assert open_tokenizer(path).end_ids == frozenset()


def test_a_padding_id_outside_the_vocabulary_is_ignored_with_a_warning(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", SYMBOLS, ids={"padding_token_id": 256})
    tokenizer = open_tokenizer(path)
    assert tokenizer.pad_id is None
    assert "256, of 256 tokens" in tokenizer.warnings[0]


def test_spm_without_scores_and_bpe_without_merges_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    assert "without scores" in str(refusal(write_vocabulary(path, SYMBOLS, model="llama")))
    assert "tokenizer.ggml.merges" in str(refusal(write_vocabulary(path, SYMBOLS, merges=None)))


def test_a_wanted_bos_that_the_file_does_not_name_is_left_out_with_a_warning(
    tmp_path: Path,
) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", SYMBOLS, flags={"add_bos_token": True})
    tokenizer = open_tokenizer(path)
    assert not tokenizer.add_bos
    assert tokenizer.encode("a", add_special=True) == symbols("a")
    assert "BOS" in tokenizer.warnings[0]


def test_odd_merges_do_no_harm(tmp_path: Path) -> None:
    tokens = [*SYMBOLS, "he", "hel", "ll", "xy"]
    merges = [
        "h e",
        "nospace",
        " x",
        "h ",
        "h e",
        "q q",
        "qq q",
        "zz top",
        "he l",
        "l l",
        "é\ud800 x",
    ]
    path = write_vocabulary(
        tmp_path / "v.gguf", tokens, merges=[merge for merge in merges if "\ud800" not in merge]
    )
    tokenizer = open_tokenizer(path)
    assert tokenizer.encode("hello") == [257, *symbols("lo")]
    assert tokenizer.encode("qqqq") == symbols("qqqq")
    assert tokenizer.decode(tokenizer.encode("hello qqqq")) == b"hello qqqq"
    assert len(tokenizer.warnings) == 1
    assert "3 of 9 merges" in tokenizer.warnings[0]


def test_of_equal_merges_the_first_counts() -> None:
    tokens, merges = ["a", "b", "c", "ab", "bc"], ["a b", "b c", "a b"]
    assert Tokenizer(vocabulary(tokens, model="gpt2", merges=merges)).encode("abc") == [3, 2]


def test_text_never_merges_into_a_control_token(tmp_path: Path) -> None:
    tokens, kinds = [*SYMBOLS, "ab", "abc"], [NORMAL] * 256 + [CONTROL, NORMAL]
    path = write_vocabulary(tmp_path / "v.gguf", tokens, kinds=kinds, merges=["a b", "ab c"])
    tokenizer = open_tokenizer(path)
    assert tokenizer.encode("ab") == symbols("ab")
    assert tokenizer.encode("abc") == [257]


def test_empty_equal_and_undecodable_tokens_do_no_harm(tmp_path: Path) -> None:
    tokens = [*SYMBOLS, "he", "", "he", "", b"\xff\xfe", "<p>", "<p>", b"<\xff>"]
    kinds = [NORMAL] * 261 + [CONTROL] * 3
    path = write_vocabulary(tmp_path / "v.gguf", tokens, kinds=kinds, merges=["h e"])
    tokenizer = open_tokenizer(path)
    assert tokenizer.encode("he") == [256]
    assert tokenizer.encode("<p>", parse_special=True) == [261]
    assert [tokenizer.piece(token, special=True) for token in range(256, 264)] == [
        *(b"he", b"", b"he", b"", b"\xff\xfe", b"<p>", b"<p>", b"<\xff>")
    ]
    spm = write_vocabulary(
        tmp_path / "w.gguf", ["a", "", "a", b"\xff"], model="llama", scores=[0, 0, 0, 0]
    )
    assert open_tokenizer(spm).encode("aa")[-2:] == [0, 0]


def test_bytes_without_a_token_are_lost_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    tokenizer = open_tokenizer(write_vocabulary(path, [s for s in SYMBOLS if s != "b"]))
    assert tokenizer.decode(tokenizer.encode("abc")) == b"ac"
    assert [line.split(" bytes")[0] for line in tokenizer.warnings] == ["1"]
    tokenizer = open_tokenizer(write_vocabulary(path, [s for s in SYMBOLS if s not in "ÿÀĀ"]))
    assert tokenizer.decode(tokenizer.encode("a\x00c")) == b"ac"
    assert tokenizer.warnings == []  # no text will ever have these


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", [])
    assert "tokenizer.ggml.tokens" in str(refusal(path))
