"""The tokenizer: real vocabularies against llama.cpp, special tokens, and the time it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocab_files import (
    BPE_VOCABULARIES,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    SYMBOLS,
    UNKNOWN,
    USER_DEFINED,
    VOCABULARIES,
    VocabFiles,
    cases,
    expected,
    open_tokenizer,
    symbols,
    write_vocabulary,
)

from strata_nb.errors import ConfigError
from strata_nb.text import pretokenizers
from strata_nb.text.merging import MAX_RUN
from strata_nb.text.vocabulary import TokenKind
from strata_nb.tokenizer import Tokenizer

MARK = "\ufdd0"


# Real vocabularies


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_text_of_llama_cpp_has_its_ids_and_comes_back(
    name: str, vocab_files: VocabFiles
) -> None:
    tokenizer = vocab_files.tokenizer(name)
    assert len(cases(name)) >= 46
    for text, ids in cases(name):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text.encode(), text
    assert tokenizer.warnings == []


@pytest.mark.parametrize("key", ["plain", "parsed"])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_random_texts_have_the_ids_that_llama_cpp_gives_them(
    name: str, key: str, vocab_files: VocabFiles
) -> None:
    tokenizer = vocab_files.tokenizer(name)
    for text, ids in zip(expected()["texts"], expected()[key][name], strict=True):
        assert tokenizer.encode(text, parse_special=key == "parsed") == ids, text


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_each_pre_tokenizer_cuts_random_texts_as_llama_cpp_does(
    name: str, vocab_files: VocabFiles
) -> None:
    tokenizer = open_tokenizer(vocab_files.path("qwen2", pre_tokenizer=name))
    texts, ids = expected()["texts"], expected()["pre_tokenizers"][name]
    differing = [
        text for text, wanted in zip(texts, ids, strict=False) if tokenizer.encode(text) != wanted
    ]
    if name in ("bloom", "viking"):  # whose words may hold </s>, of which llama.cpp makes a token
        differing = [text for text in differing if "</s>" not in text]
    assert differing == []
    assert tokenizer.warnings == []


def test_every_set_of_expressions_is_tried() -> None:
    known = {words.expressions for words in pretokenizers._BY_NAME.values()}
    tried = {pretokenizers._BY_NAME[name].expressions for name in PRE_TOKENIZERS}
    assert known == tried


@pytest.mark.parametrize("name", BPE_VOCABULARIES)
def test_words_that_are_tokens_stay_whole_only_where_the_pre_tokenizer_says_so(
    name: str, vocab_files: VocabFiles
) -> None:
    whole = pretokenizers.find("qwen2" if name == "qwen35" else name)
    assert whole is not None
    assert whole.whole_words == (name == "llama-bpe")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_same_tokens_end_a_generation_as_in_llama_cpp(
    name: str, vocab_files: VocabFiles
) -> None:
    assert sorted(vocab_files.tokenizer(name).end_ids) == expected()["ends"][name]


def test_the_special_tokens_of_real_vocabularies_are_known(vocab_files: VocabFiles) -> None:
    llama3 = vocab_files.tokenizer("llama-bpe")
    assert (llama3.bos_id, llama3.eos_id, llama3.eot_id) == (128000, 128001, 128009)
    assert (llama3.add_bos, llama3.add_eos, llama3.vocab_size) == (True, False, 128256)
    assert llama3.text(128009) == "<|eot_id|>"
    assert llama3.is_control(128009)
    assert not llama3.is_control(1000)
    assert "<|eot_id|>" in llama3.control_texts
    llama2 = vocab_files.tokenizer("llama-spm")
    assert (llama2.bos_id, llama2.eos_id, llama2.unk_id, llama2.pad_id) == (1, 2, 0, None)
    assert llama2.add_bos
    assert llama2.control_texts == ["<unk>", "<s>", "</s>"]
    qwen = vocab_files.tokenizer("qwen2")
    assert qwen.pad_id == qwen.eos_id == 151643
    assert not qwen.add_bos
    assert len(qwen.user_defined_texts) == 290


@pytest.mark.parametrize("name", VOCABULARIES)
def test_any_text_comes_back_from_its_ids(name: str, vocab_files: VocabFiles) -> None:
    tokenizer = vocab_files.tokenizer(name)
    piece = st.one_of(
        st.text(max_size=8), st.sampled_from([*tokenizer.control_texts[:9], " ", "\n"])
    )

    @given(st.lists(piece, max_size=6).map("".join), st.booleans())
    @settings(max_examples=150)
    def comes_back(text: str, parse_special: bool) -> None:
        text = text.replace("▁", "")  # which SPM cannot tell from a space
        ids = tokenizer.encode(text, parse_special=parse_special)
        assert tokenizer.decode(ids) == text.encode()

    comes_back()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_plain_text_never_becomes_a_control_token(name: str, vocab_files: VocabFiles) -> None:
    tokenizer = vocab_files.tokenizer(name)
    text = "a".join(tokenizer.control_texts)
    assert not any(map(tokenizer.is_control, tokenizer.encode(text)))
    parsed = tokenizer.encode(text, parse_special=True)
    assert sum(map(tokenizer.is_control, parsed)) == len(tokenizer.control_texts)


def test_bos_and_eos_are_added_where_asked_for_and_wanted(
    vocab_files: VocabFiles, tmp_path: Path
) -> None:
    llama3 = vocab_files.tokenizer("llama-bpe")
    assert llama3.encode("Hello") == [9906]
    assert llama3.encode("Hello", add_special=True) == [128000, 9906]
    assert llama3.encode("", add_special=True) == [128000]
    assert llama3.encode("") == []
    assert vocab_files.tokenizer("gpt-2").encode("", add_special=True) == []
    path = write_vocabulary(
        tmp_path / "v.gguf",
        [*SYMBOLS, "[B]", "[E]"],
        ids={"bos_token_id": 256, "eos_token_id": 257},
        flags={"add_bos_token": True, "add_eos_token": True},
    )
    assert open_tokenizer(path).encode("a", add_special=True) == [256, SYMBOLS.index("a"), 257]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_that_is_not_utf8_is_encoded_as_replacement_characters(
    name: str, vocab_files: VocabFiles
) -> None:
    tokenizer = vocab_files.tokenizer(name)
    assert tokenizer.encode("a\udcffb\ud800") == tokenizer.encode("a\ufffdb\ufffd")


@pytest.mark.parametrize("token", [-1, 50257, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(token: int, vocab_files: VocabFiles) -> None:
    tokenizer = vocab_files.tokenizer("gpt-2")
    uses: list[Callable[[], object]] = [
        lambda: tokenizer.decode([0, token]),
        lambda: tokenizer.stream().feed(token),
        lambda: tokenizer.piece(token),
        lambda: tokenizer.text(token),
        lambda: tokenizer.is_control(token),
    ]
    for use in uses:
        with pytest.raises(ConfigError, match=rf"{token} .*50257") as caught:
            use()
        assert caught.value.hint


# Time


LONG_TEXTS = {
    "letters": "a",
    "capitals": "A",
    "digits": "7",
    "spaces": " ",
    "blank lines": "\n",
    "carriage returns": "\r\n",
    "spaces and lines": " \n",
    "signs": "-",
    "Han": "中",
    "emoji": "🙂",
    "combining marks": "\u0301",
    "control tokens": "<|im_end|>",
    "beginnings of control tokens": "<|",
}


def encode_seconds(tokenizer: Tokenizer, text: str) -> float:
    """The least processor time of a few runs."""
    times = []
    for _ in range(3):
        start = time.process_time()
        tokenizer.encode(text, parse_special=True)
        times.append(time.process_time() - start)
    return min(times)


def check_growth(tokenizer: Tokenizer) -> None:
    """Eight times the text takes 8 times the time, not 64, whatever ends a run of spaces."""
    for what, unit in LONG_TEXTS.items():
        for end in ("", "x", "7") if unit.isspace() else ("",):
            text = unit * (5_000 // len(unit))
            short, long = (encode_seconds(tokenizer, text * n + end) for n in (1, 8))
            assert long <= 24 * short + 0.002, f"{what}: {short:.4f} s, then {long:.4f} s"


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm", "qwen35"])
def test_the_time_for_a_text_grows_with_its_length_only(name: str, vocab_files: VocabFiles) -> None:
    check_growth(vocab_files.tokenizer(name))


@pytest.mark.parametrize("name", ["deepseek-llm", "deepseek-coder", "default", "tekken"])
def test_no_pre_tokenizer_takes_quadratic_time(name: str, tmp_path: Path) -> None:
    check_growth(open_tokenizer(write_vocabulary(tmp_path / "v.gguf", SYMBOLS, pre=name)))


def test_an_absurd_run_is_refused_before_it_ends_the_process(vocab_files: VocabFiles) -> None:
    tokenizer = vocab_files.tokenizer("gpt-2")
    with pytest.raises(ConfigError, match="1,000,001 characters of one class"):
        tokenizer.encode("b" + " " * (MAX_RUN + 1) + "b")
    assert len(tokenizer.encode(" " * MAX_RUN + "b")) == MAX_RUN
    assert tokenizer.encode("a 1" * (MAX_RUN // 2))[:3] == [64, 352, 64]


# Special tokens


def special_tokenizer(tmp_path: Path, *special: tuple[str, TokenKind]) -> Tokenizer:
    """256 bytes and the special tokens, from id 256 on."""
    tokens = [*SYMBOLS, *(text for text, _ in special)]
    kinds = [NORMAL] * 256 + [kind for _, kind in special]
    return open_tokenizer(write_vocabulary(tmp_path / "v.gguf", tokens, kinds=kinds))


def test_the_longest_special_token_goes_first_wherever_it_stands(tmp_path: Path) -> None:
    tokenizer = special_tokenizer(
        tmp_path, ("<a>", CONTROL), (">bcd<", CONTROL), ("<", CONTROL), ("<a><", CONTROL)
    )
    encode = tokenizer.encode
    assert encode("<a>bcd<a>", parse_special=True) == [258, *symbols("a"), 257, *symbols("a>")]
    assert encode("<a><a>", parse_special=True) == [259, *symbols("a>")]
    assert encode("x<a>", parse_special=True) == [*symbols("x"), 256]
    assert encode("<a>") == symbols("<a>")


def test_user_defined_tokens_are_parsed_in_every_text(tmp_path: Path) -> None:
    tokenizer = special_tokenizer(tmp_path, ("<think>", USER_DEFINED), ("<unk>", UNKNOWN))
    assert tokenizer.encode("a<think>b<unk>") == [*symbols("a"), 256, *symbols("b<unk>")]
    assert tokenizer.encode("<unk><think>", parse_special=True) == [257, 256]
    assert tokenizer.user_defined_texts == ["<think>"]
    assert tokenizer.control_texts == ["<unk>"]
    assert tokenizer.decode([256, 257], skip_special=True) == b"<think>"


def test_a_mark_protects_one_occurrence_and_is_gone(tmp_path: Path) -> None:
    tokenizer = special_tokenizer(tmp_path, ("<|x|>", CONTROL), ("#", CONTROL))
    encode = tokenizer.encode_protected
    assert encode(f"<|x|>a<{MARK}|x|>", MARK) == [256, *symbols("a<|x|>")]
    assert encode(f"<|x|{MARK}>", MARK) == symbols("<|x|>")
    assert encode(f"{MARK}<|x|>{MARK}", MARK) == [256]
    assert encode(f"#{MARK}#", MARK) == [*symbols("#"), 257]
    assert encode(f"a{MARK}{MARK}b", MARK) == tokenizer.encode("ab")


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm"])
def test_what_marks_protect_has_the_ids_of_plain_text(name: str, vocab_files: VocabFiles) -> None:
    tokenizer = vocab_files.tokenizer(name)
    for text in expected()["texts"]:
        everywhere = MARK.join(text)
        assert tokenizer.encode_protected(everywhere, MARK) == tokenizer.encode(text), text
        assert tokenizer.encode_protected(text, MARK) == tokenizer.encode(text, parse_special=True)


def test_special_tokens_of_phi3_swallow_the_spaces_behind_them(tmp_path: Path) -> None:
    tokens = [*SYMBOLS, "<|end|>", "<s>"]
    kinds = [NORMAL] * 256 + [CONTROL] * 2
    path = write_vocabulary(tmp_path / "v.gguf", tokens, kinds=kinds, name="Phi-3 mini")
    encode = open_tokenizer(path).encode
    assert encode("a <|end|> \n b", parse_special=True) == [*symbols("aĠ"), 256, *symbols("b")]
    assert encode("<s> b", parse_special=True) == [257, *symbols("Ġb")]


def test_the_mask_token_of_jina_swallows_the_spaces_before_it(tmp_path: Path) -> None:
    tokens, kinds = [*SYMBOLS, "<mask>"], [NORMAL] * 256 + [CONTROL]
    path = write_vocabulary(tmp_path / "v.gguf", tokens, kinds=kinds, pre="jina-v2-de")
    ids = open_tokenizer(path).encode("a \n<mask> b", parse_special=True)
    assert ids == [*symbols("a"), 256, *symbols("Ġb")]


def test_ends_are_found_by_keys_and_by_well_known_texts(tmp_path: Path) -> None:
    tokens = [*SYMBOLS, "<|im_end|>", "</s>", "<|file_sep|>", "stop", "<|fim_prefix|>", "turn"]
    path = write_vocabulary(
        tmp_path / "v.gguf", tokens, ids={"eos_token_id": 259, "eot_token_id": 261}
    )
    tokenizer = open_tokenizer(path)
    assert tokenizer.end_ids == {256, 257, 258, 259, 261}
    assert (tokenizer.eos_id, tokenizer.eot_id, tokenizer.bos_id) == (259, 261, None)
    assert [tokenizer.is_control(token) for token in (256, 258, 259, 260)] == [
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "others", [["<|return|>", "<|call|>"], ["<|flush|>", "<|calls|>"], ["<|flush|>", "<|call|>"]]
)
def test_the_end_of_a_message_is_no_end_where_there_are_ends_of_answers(
    others: list[str], tmp_path: Path
) -> None:
    ends = open_tokenizer(
        write_vocabulary(tmp_path / "v.gguf", [*SYMBOLS, "<|end|>", *others])
    ).end_ids
    assert ends == {257, 258}
    alone = open_tokenizer(write_vocabulary(tmp_path / "w.gguf", [*SYMBOLS, "<|end|>", "x"]))
    assert alone.end_ids == {256}
