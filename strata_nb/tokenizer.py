"""Turn text into token ids and back, from the vocabulary inside a GGUF file.

    text --partition--> special tokens and plain pieces --`tokenizers`--> ids
    ids --pieces of bytes--> bytes, or text where a stream has a character whole

The special tokens are found here, not in `tokenizers`: the longest goes first wherever it stands,
as in llama.cpp, and whether control tokens are parsed is the caller's decision for each text. Plain
pieces go through a BPE model of `tokenizers` (merging.py, sentencepiece.py). Text that is not UTF-8
(lone surrogates) becomes U+FFFD.

Decoding gives back exactly the bytes that were encoded; the tidying of spaces before punctuation
that some libraries apply is not done.
"""

from __future__ import annotations

import bisect
import codecs
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from strata_nb.errors import ConfigError
from strata_nb.gguf import GGUFFile
from strata_nb.text.merging import byte_level, bytes_of_symbols
from strata_nb.text.sentencepiece import SPACE, sentencepiece
from strata_nb.text.vocabulary import TokenKind, Vocabulary, read_vocabulary

_SURROGATE = re.compile("[\ud800-\udfff]")
_ASCII_SPACE = " \t\n\v\f\r"
_FEW = 8  # special tokens alike in length and beginning: so many are each searched for first


class Tokenizer:
    """Encode and decode with one vocabulary.

    bos_id, eos_id, eot_id, pad_id, unk_id   ids of special tokens, None where there is none
    end_ids            all tokens that end a generation
    add_bos, add_eos   what `encode(add_special=True)` puts around a text
    control_texts      what `parse_special=True` parses and plain text does not
    user_defined_texts what is a token of its own in every text
    warnings           what was odd about the vocabulary, one line each
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eot_id = vocabulary.eot_id
        self.pad_id = vocabulary.pad_id
        self.unk_id = vocabulary.unk_id
        self.end_ids = vocabulary.end_ids
        self.add_bos = vocabulary.add_bos
        self.add_eos = vocabulary.add_eos
        self.vocab_size = len(vocabulary.texts)
        self.warnings = list(vocabulary.warnings)
        self._vocabulary = vocabulary
        self._is_spm = vocabulary.model == "llama"
        make = sentencepiece if self._is_spm else byte_level
        self._encode_plain = make(vocabulary, self.warnings)
        kinds = vocabulary.kinds
        control = _ids_of(kinds, TokenKind.CONTROL, TokenKind.UNKNOWN)
        user_defined = _ids_of(kinds, TokenKind.USER_DEFINED)
        self.control_texts = _texts_of(vocabulary, control)
        self.user_defined_texts = _texts_of(vocabulary, user_defined)
        self._without_control = _SpecialTexts(vocabulary, user_defined)
        self._with_control = _SpecialTexts(vocabulary, user_defined + control)
        self._control_ids = frozenset(control)
        self._special_ids = frozenset(control + user_defined)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """Build the tokenizer of a file; FileFormatError where its vocabulary cannot be used."""
        return cls(read_vocabulary(file))

    def encode(
        self, text: str, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Return the ids of a text.

        `add_special` puts BOS before and EOS after it, as far as the vocabulary wants them (also
        where the text has its own); `parse_special` turns the texts of control tokens into these
        tokens, which otherwise only stand for themselves. User-defined tokens are always parsed.
        """
        special = self._with_control if parse_special else self._without_control
        ids = self._encode(special, _SURROGATE.sub("\ufffd", text), ())
        if add_special and self.add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_protected(self, text: str, mark: str) -> list[int]:
        """Return the ids of a text in which `mark` keeps special tokens from being parsed.

        `mark` is one character. A special token with a mark inside it (or, if it has only one
        character, behind it) is not parsed; then the marks are gone, and what they protected has
        the ids that it would have as plain text.
        """
        pieces = _SURROGATE.sub("\ufffd", text).split(mark)
        marked, end = [], 0
        for piece in pieces[:-1]:
            end += len(piece)
            marked.append(end)
        return self._encode(self._with_control, "".join(pieces), marked)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """Return the bytes that ids stand for; `skip_special` leaves control tokens out.

        The inverse of `encode(parse_special=True)`: the space that SPM puts before a text is taken
        away again. ConfigError for an id that is not in the vocabulary.
        """
        pieces = _Pieces(self, skip_special, starts_text=True)
        return b"".join([pieces.next(token) for token in ids])

    def stream(self, skip_special: bool = True) -> StreamDecoder:
        """Return a decoder for ids that come one by one and continue a text."""
        return StreamDecoder(_Pieces(self, skip_special, starts_text=False))

    def piece(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of one token within a text; of control tokens only with `special`.

        ConfigError for an id that is not in the vocabulary.
        """
        token = self._checked(token)
        kind = self._vocabulary.kinds[token]
        text = self._vocabulary.texts[token]
        if token in self._control_ids:
            return _raw(text) if special else b""
        if kind == TokenKind.USER_DEFINED:
            return _raw(text)
        if kind == TokenKind.BYTE:
            return bytes([int(text[3:5], 16)])
        if self._is_spm:
            return _raw(text.replace(SPACE, " "))
        return bytes_of_symbols(text)

    def text(self, token: int) -> str:
        """Return a token's text as the vocabulary has it."""
        return self._vocabulary.texts[self._checked(token)]

    def is_control(self, token: int) -> bool:
        """Tell whether a token is one that plain text never contains and a stream does not show."""
        return self._checked(token) in self._control_ids

    def _checked(self, token: int) -> int:
        token = operator.index(token)
        if not 0 <= token < self.vocab_size:
            raise ConfigError(
                f"token id {token} is not in the vocabulary of {self.vocab_size} tokens",
                hint="encode the text with this model's own tokenizer",
            )
        return token

    def _encode(self, special: _SpecialTexts, text: str, marked: Sequence[int]) -> list[int]:
        """Encode clean text; no special token is parsed across one of the `marked` positions."""
        ids: list[int] = []
        after_special = True
        for part in special.partition(text, marked):
            if isinstance(part, int):
                ids.append(part)
                after_special = True
            else:
                if self._is_spm:
                    prefix = " " if self._vocabulary.space_prefix and after_special else ""
                    part = (prefix + part).replace(" ", SPACE)
                ids += self._encode_plain(part)
                after_special = False
        return ids


class StreamDecoder:
    """Turn ids that arrive one by one into text; a character is given out when it is whole."""

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the characters that this token completes, often none or several.

        Bytes that can never become a character are given out as U+FFFD at once. ConfigError for an
        id that is not in the vocabulary.
        """
        return self._characters.decode(self._pieces.next(token))

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for an unfinished character, or nothing."""
        return self._characters.decode(b"", final=True)


class _Pieces:
    """Give the bytes of successive tokens, without the space that SPM has put before a text.

    Every text after a special token has that space, and so has the first if `starts_text`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, *, starts_text: bool) -> None:
        self._tokenizer = tokenizer
        self._special = not skip_special
        self._strips = tokenizer._vocabulary.space_prefix
        self._drop_space = starts_text and self._strips

    def next(self, token: int) -> bytes:
        piece = self._tokenizer.piece(token, special=self._special)
        if self._strips:
            if token in self._tokenizer._special_ids:
                self._drop_space = True
            elif self._drop_space:
                self._drop_space = False
                return piece.removeprefix(b" ")
        return piece


class _SpecialTexts:
    """Cut the special tokens out of texts: the longest first, wherever it stands.

    They are kept under the first two characters of their texts: few pairs, so that one search for
    each tells where in a text one of thousands of tokens can stand.
    """

    def __init__(self, vocabulary: Vocabulary, ids: Sequence[int]) -> None:
        self._strip_left = vocabulary.strip_left
        self._strip_right = vocabulary.strip_right
        # pair -> (bytes, characters) of the texts -> token of each text
        self._by_pair: dict[str, dict[tuple[int, int], dict[str, int]]] = {}
        for token in ids:
            text = vocabulary.texts[token]
            if text:
                lengths = len(_raw(text)), len(text)
                by_lengths = self._by_pair.setdefault(text[:2], {})
                by_lengths.setdefault(lengths, {}).setdefault(text, token)

    def partition(self, text: str, marked: Sequence[int]) -> Iterator[str | int]:
        """Yield special tokens and the texts between them, none of them empty."""
        start = 0
        for cut in sorted(self._cuts(text, marked)):
            if start < cut.start:
                yield text[start : cut.start]
            yield cut.token
            start = cut.end
        if start < len(text):
            yield text[start:]

    def _cuts(self, text: str, marked: Sequence[int]) -> list[_Cut]:
        """Find the special tokens of a text, all of one length in one pass over the places."""
        places = {pair: list(_places(text, pair)) for pair in self._by_pair if pair in text}
        by_bytes: dict[int, list[tuple[str, int, dict[str, int]]]] = {}
        for pair in places:
            for (size, length), tokens in self._by_pair[pair].items():
                by_bytes.setdefault(size, []).append((pair, length, tokens))
        taken = bytearray(len(text))
        cuts: list[_Cut] = []
        for size in sorted(by_bytes, reverse=True):
            hits: list[tuple[int, int, int]] = []
            for pair, length, tokens in by_bytes[size]:
                if len(tokens) <= _FEW and not any(special in text for special in tokens):
                    continue
                places[pair] = [at for at in places[pair] if not taken[at]]
                for at in places[pair]:
                    token = tokens.get(text[at : at + length])
                    if token is not None and not _has_mark(marked, at, length):
                        hits.append((token, at, at + length))
            for token, at, end in sorted(hits):
                if taken.find(1, at, end) < 0:
                    cut = self._cut(text, taken, token, at, end)
                    taken[cut.start : cut.end] = b"\1" * (cut.end - cut.start)
                    cuts.append(cut)
        return cuts

    def _cut(self, text: str, taken: bytearray, token: int, start: int, end: int) -> _Cut:
        """Widen a token by the spaces beside it that it swallows and no other token has taken."""
        if token in self._strip_left:
            while start > 0 and text[start - 1] in _ASCII_SPACE and not taken[start - 1]:
                start -= 1
        if token in self._strip_right:
            while end < len(text) and text[end] in _ASCII_SPACE and not taken[end]:
                end += 1
        return _Cut(start, end, token)


class _Cut(NamedTuple):
    """A stretch of a text that a special token takes."""

    start: int
    end: int
    token: int


def _places(text: str, part: str) -> Iterator[int]:
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)


def _has_mark(marked: Sequence[int], start: int, length: int) -> bool:
    """Tell whether a mark stands behind the first character and not behind the whole."""
    following = bisect.bisect_right(marked, start)
    return following < len(marked) and marked[following] <= start + max(length - 1, 1)


def _ids_of(kinds: np.ndarray, *wanted: TokenKind) -> list[int]:
    found: list[int] = np.flatnonzero(np.isin(kinds, wanted)).tolist()
    return found


def _texts_of(vocabulary: Vocabulary, ids: Sequence[int]) -> list[str]:
    return [vocabulary.texts[token] for token in ids if vocabulary.texts[token]]


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
