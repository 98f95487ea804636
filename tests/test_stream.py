"""Streaming: text comes out as soon as a character is whole, and never before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocab_files import (
    VOCABULARIES,
    VocabFiles,
    cases,
    expected,
)

from strata_nb.tokenizer import Tokenizer


def streamed(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool = True) -> str:
    stream = tokenizer.stream(skip_special=skip_special)
    return "".join([*(stream.feed(token) for token in ids), stream.flush()])


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_stream_gives_the_text_of_any_ids(name: str, vocab_files: VocabFiles) -> None:
    tokenizer = vocab_files.tokenizer(name)
    first_byte = tokenizer.encode("é")[-1]  # half a character, or nearly
    token = st.one_of(
        st.integers(0, tokenizer.vocab_size - 1),
        st.sampled_from([*tokenizer.encode("🙂中é"), first_byte, *sorted(tokenizer.end_ids)]),
    )

    @given(st.lists(token, max_size=30), st.booleans())
    @settings(max_examples=200)
    def same_text(ids: list[int], skip_special: bool) -> None:
        # A stream continues a text: what goes before keeps the first space of an SPM text.
        before = tokenizer.encode("x")
        whole = tokenizer.decode([*before, *ids], skip_special=skip_special)
        text = whole.removeprefix(b"x").decode("utf-8", "replace")
        assert streamed(tokenizer, ids, skip_special=skip_special) == text

    same_text()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_each_character_comes_when_it_is_whole(name: str, vocab_files: VocabFiles) -> None:
    tokenizer = vocab_files.tokenizer(name)

    @given(st.text(st.sampled_from("aé中🙂\u0301\u200dក 👩\n"), max_size=20))
    @settings(max_examples=150)
    def whole_characters(text: str) -> None:
        stream = tokenizer.stream()
        fed, shown = b"", ""
        for token in tokenizer.encode(text):
            fed += tokenizer.piece(token)
            shown += stream.feed(token)
            assert fed.startswith(shown.encode())
            assert len(fed) - len(shown.encode()) < 4  # at most the unfinished one is held back
            assert fed[len(shown.encode()) :].decode("utf-8", "ignore") == ""
        assert stream.flush() == ""
        assert shown.removeprefix(" ") == text.removeprefix(" ") or shown == f" {text}"

    whole_characters()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_valid_text_streams_without_replacement_characters(
    name: str, vocab_files: VocabFiles
) -> None:
    tokenizer = vocab_files.tokenizer(name)
    for text in [*(text for text, _ in cases(name)), *expected()["texts"]]:
        text = text.replace("▁", " ")
        shown = streamed(tokenizer, tokenizer.encode(text))
        assert shown in (text, f" {text}")


def test_an_unfinished_character_is_replaced_at_the_end(vocab_files: VocabFiles) -> None:
    tokenizer = vocab_files.tokenizer("gpt-2")
    first, *_ = tokenizer.encode("🙂")
    stream = tokenizer.stream()
    assert stream.feed(first) == ""
    assert stream.flush() == "\ufffd"
    stream = tokenizer.stream()
    assert stream.feed(first) == ""
    assert stream.feed(tokenizer.encode("a")[0]) == "\ufffda"
    assert stream.flush() == ""


def test_control_tokens_are_shown_only_where_asked_for(vocab_files: VocabFiles) -> None:
    tokenizer = vocab_files.tokenizer("qwen2")
    ids = tokenizer.encode("a<|im_end|>b", parse_special=True)
    assert streamed(tokenizer, ids) == "ab"
    assert streamed(tokenizer, ids, skip_special=False) == "a<|im_end|>b"
    assert tokenizer.piece(ids[1]) == b""
    assert tokenizer.piece(ids[1], special=True) == b"<|im_end|>"


def test_a_stream_of_spm_keeps_the_space_that_continues_a_text(vocab_files: VocabFiles) -> None:
    tokenizer = vocab_files.tokenizer("llama-spm")
    world = tokenizer.encode("world")
    assert streamed(tokenizer, world) == " world"
    assert tokenizer.decode(world) == b"world"
