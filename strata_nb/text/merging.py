"""Merge the characters of plain text into the tokens of a byte-level BPE vocabulary.

The work is done by the BPE model of `tokenizers`, which takes a vocabulary and a list of merges
whose parts and results must all be in it. Where a file does not fit, *stand-ins* make it: tokens
with ids from vocab_size on, which exist only inside the model and are replaced in its result. They
are the results of merges that are no tokens (or are special ones, which text must never become),
and the bytes that have no token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import add

import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from strata_nb.errors import ConfigError
from strata_nb.text.vocabulary import TokenKind, Vocabulary

Encode = Callable[[str], list[int]]  # of a text without special tokens

# Oniguruma, inside `tokenizers`, gives up after 10 million steps back in one match, which ends the
# thread, and it takes one or a few for each character of a run.
MAX_RUN = 1_000_000
_RUNS = re.compile(r"\s+|[^\W\d_]+|\d+|[^\w\s]+|_+")

_MERGED = (TokenKind.NORMAL, TokenKind.UNUSED, TokenKind.UNDEFINED)
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (*range(0x21), *range(0x7F, 0xA1), 0xAD)
# How byte-level BPE writes a byte as a character, since GPT-2: itself, or one from U+0100 on.
BYTE_OF_SYMBOL = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)
}
# Control characters, and bytes that begin no assigned character: even good vocabularies lack some.
_RARE_BYTES = frozenset(
    (*range(9), 11, 12, *range(14, 32), 127, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100))
)


def byte_level(vocabulary: Vocabulary, warnings: list[str]) -> Encode:
    """Build the encoder of a byte-level BPE vocabulary.

    Merges that are not two texts, or can never apply, are left out; of equal ones the first counts.
    What was left out, and bytes that texts will lack, get a line in `warnings`. The encoder raises
    ConfigError for a text with more than a million characters of one class in a row.
    """
    tokens = plain_tokens(vocabulary)
    missing = [symbol for symbol in BYTE_OF_SYMBOL if symbol not in tokens]
    lost = [byte for symbol in missing if (byte := BYTE_OF_SYMBOL[symbol]) not in _RARE_BYTES]
    if lost:
        warnings.append(f"{len(lost)} bytes that texts are made of have no token and will be lost")
    lefts, rights = _parts(vocabulary.merges, warnings)
    merges = list(zip(lefts, rights, strict=True))
    results = {text for text in map(add, lefts, rights) if text not in tokens}
    others = {text for text in results.union(missing) if set(text) <= _SYMBOLS}
    known = dict(tokens)
    stand_ins: dict[int, tuple[int, ...]] = {}
    for token, text in enumerate(sorted(others), len(vocabulary.texts)):
        known[text] = token
        stand_ins[token] = tuple(tokens[symbol] for symbol in text if symbol in tokens)
    useless = set(lefts).union(rights).difference(known) | (results - others)
    if useless:
        merges = [pair for pair in merges if useless.isdisjoint((*pair, "".join(pair)))]
    tokenizer = Tokenizer(models.BPE(known, merges, ignore_merges=vocabulary.words.whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(x), "isolated") for x in vocabulary.words.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )

    def encode(text: str) -> list[int]:
        if len(text) > MAX_RUN:
            _check_runs(text)
        return replace_stand_ins(tokenizer.encode(text, add_special_tokens=False).ids, stand_ins)

    return encode


def bytes_of_symbols(text: str) -> bytes:
    """Return the bytes of a byte-level token; a token in plain writing is taken as it is."""
    try:
        return bytes([BYTE_OF_SYMBOL[symbol] for symbol in text])
    except KeyError:
        return text.encode("utf-8", "surrogateescape")


def plain_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the tokens that characters may merge into, by their texts.

    Of equal texts the first counts. Control tokens are none of them, nor are user-defined ones:
    where these are wanted they are cut out before.
    """
    ids = np.flatnonzero(np.isin(vocabulary.kinds, _MERGED)).tolist()
    tokens = {vocabulary.texts[token]: token for token in reversed(ids)}
    tokens.pop("", None)
    if not _is_utf8("".join(tokens)):
        tokens = {text: token for text, token in tokens.items() if _is_utf8(text)}
    return tokens


def replace_stand_ins(ids: list[int], stand_ins: dict[int, tuple[int, ...]]) -> list[int]:
    """Return ids in which the tokens behind the end of the vocabulary are replaced."""
    if not stand_ins or stand_ins.keys().isdisjoint(ids):
        return ids
    return list(chain.from_iterable(stand_ins.get(token, (token,)) for token in ids))


def _parts(merges: Sequence[str], warnings: list[str]) -> tuple[list[str], list[str]]:
    """Split each "left right"; 280,000 of them take a tenth of a second when nothing is odd."""
    if len(set(merges)) < len(merges):
        merges = list(dict.fromkeys(merges))
    flat = " ".join(merges).split(" ") if merges else []
    if "" not in flat and set(map(str.count, merges, repeat(" "))) <= {1}:
        return flat[::2], flat[1::2]
    # A text may hold spaces: the first one behind the first character separates, as in llama.cpp.
    cuts = [merge.find(" ", 1) for merge in merges]
    pairs = [
        (merge[:cut], merge[cut + 1 :])
        for merge, cut in zip(merges, cuts, strict=True)
        if 0 < cut < len(merge) - 1
    ]
    if len(pairs) < len(merges):
        warnings.append(f"{len(merges) - len(pairs)} of {len(merges)} merges are not two texts")
    return [left for left, _ in pairs], [right for _, right in pairs]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_runs(text: str) -> None:
    longest = max(match.end() - match.start() for match in _RUNS.finditer(text))
    if longest > MAX_RUN:
        raise ConfigError(
            f"the text has {longest:,} characters of one class (spaces, letters, digits, signs)"
            f" in a row; at most {MAX_RUN:,} can be encoded",
            hint="is this a text?",
        )


_SYMBOLS = frozenset(BYTE_OF_SYMBOL)
