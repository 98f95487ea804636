"""The tokenizer: small vocabularies against the definitions of BPE and SPM."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocab_files import BYTE, BYTES, NORMAL, UNKNOWN, VocabFiles, vocabulary

from strata_nb.tokenizer import Tokenizer


def merge_by_definition(text: str, vocabulary: Sequence[str], merges: Sequence[str]) -> list[int]:
    """BPE: join the neighbours of the earliest merge, leftmost first, until none is left."""
    pairs: dict[tuple[str, str], int] = {}
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ")
        pairs.setdefault((left, right), rank)
    parts = list(text)
    while True:
        candidates = [
            (pairs[parts[i], parts[i + 1]], i)
            for i in range(len(parts) - 1)
            if (parts[i], parts[i + 1]) in pairs
        ]
        if not candidates:
            break
        _, i = min(candidates)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        texts = [part] if part in vocabulary else part
        ids += [vocabulary.index(text) for text in texts if text in vocabulary]
    return ids


@given(st.data())
@settings(max_examples=300)
def test_any_list_of_merges_is_applied_by_the_definition(data: st.DataObject) -> None:
    some = st.text("abc", min_size=1, max_size=4)
    tokens = data.draw(st.lists(some, min_size=1, max_size=12, unique=True))
    merges = data.draw(st.lists(st.tuples(some, some).map(" ".join), max_size=20))
    text = data.draw(st.text("abc", max_size=20))
    ids = Tokenizer(vocabulary(tokens, model="gpt2", merges=merges)).encode(text)
    assert ids == merge_by_definition(text, tokens, merges)


def join_by_definition(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[str]:
    """SPM: join the neighbours whose result has the highest score, leftmost first."""
    parts = list(text)
    while True:
        candidates = [
            (-scores[tokens.index(joined)], i)
            for i in range(len(parts) - 1)
            if (joined := parts[i] + parts[i + 1]) in tokens
        ]
        if not candidates:
            return parts
        _, i = min(candidates)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize("scoring", ["distinct", "ties"])
@given(st.data())
@settings(max_examples=400)
def test_any_spm_vocabulary_joins_by_the_definition(scoring: str, data: st.DataObject) -> None:
    several = st.text("ab▁", min_size=2, max_size=5)
    tokens = ["a", "▁", *data.draw(st.lists(several, min_size=8, max_size=16, unique=True))]
    if scoring == "distinct":
        scores = data.draw(st.permutations([float(i) for i in range(len(tokens))]))
    else:
        score = st.sampled_from([0.0, -1.0, -2.0])
        scores = data.draw(st.lists(score, min_size=len(tokens), max_size=len(tokens)))
    text = data.draw(st.text("ab ", min_size=8, max_size=24))
    tokenizer = Tokenizer(
        vocabulary([*tokens, *BYTES], model="llama", scores=[*scores, *[-9.0] * 256])
    )
    wanted = join_by_definition(text.replace(" ", "▁"), [*tokens, *BYTES], [*scores, *[-9.0] * 256])
    got = [tokenizer.text(token).replace("<0x62>", "b") for token in tokenizer.encode(text)]
    assert got == wanted


def test_runs_of_spaces_join_by_the_definition_in_a_real_vocabulary(
    vocab_files: VocabFiles,
) -> None:
    tokenizer = vocab_files.tokenizer("llama-spm")
    runs = ["▁" * length for length in range(1, 17)]
    tokens = [*runs, "a", "▁a"]
    scores = [-1e9] * 16 + [-2.0, -1.0]
    for length in range(70):
        for end in ("", "a"):
            wanted = join_by_definition("▁" * (length + 1) + end, tokens, scores)
            ids = tokenizer.encode(" " * length + end) if length or end else []
            assert [tokenizer.text(token) for token in ids] == (wanted if length or end else [])


def test_characters_outside_an_spm_vocabulary_are_spelled_in_bytes_or_unknown() -> None:
    tokens = ["<unk>", "▁", "a", "aé", *BYTES]
    kinds = [UNKNOWN, NORMAL, NORMAL, NORMAL, *[BYTE] * 256]
    scores = [0.0, -1.0, -2.0, -3.0, *[0.0] * 256]
    whole = Tokenizer(
        vocabulary(tokens, model="llama", scores=scores, kinds=kinds, unk_id=0, space_prefix=True)
    )
    assert whole.encode("aé") == [1, 3]
    assert whole.encode("éa") == [1, 4 + 0xC3, 4 + 0xA9, 2]
    assert whole.decode(whole.encode(" 🙂é\n")) == " 🙂é\n".encode()
    assert whole.encode("<0x41>") == [1, *(4 + byte for byte in b"<0x41>")]
    assert whole.warnings == []
    poor = Tokenizer(
        vocabulary(tokens[:4], model="llama", scores=scores[:4], kinds=kinds[:4], unk_id=0)
    )
    assert poor.encode("aéa🙂é") == [3, 2, 0, 0]
    assert re.search(r"256 of the 256 bytes .* become the unknown token", poor.warnings[0])
    nothing = Tokenizer(vocabulary(tokens[1:3], model="llama", scores=[-1.0, -2.0]))
    assert nothing.encode("aba") == [1, 1]
    assert "are lost" in nothing.warnings[0]


def test_spm_puts_a_space_before_each_text_and_takes_it_away_again(
    vocab_files: VocabFiles,
) -> None:
    tokenizer = vocab_files.tokenizer("llama-spm")
    ids = tokenizer.encode("Hello<s>world</s></s> x", add_special=True, parse_special=True)
    assert [tokenizer.text(token) for token in ids] == [
        *("<s>", "▁Hello", "<s>", "▁world", "</s>", "</s>", "▁", "▁x")
    ]
    assert tokenizer.decode(ids) == b"<s>Hello<s>world</s></s> x"
    assert tokenizer.decode(ids, skip_special=True) == b"Helloworld x"
