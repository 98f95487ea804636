"""Read a vocabulary from a GGUF file and check it: tokens, kinds, scores, merges, special tokens.

The file holds parallel arrays (text, kind and, for SPM, score of each token) and a few ids. Much is
left for the reader to know: defaults that come with the kind of vocabulary, and which tokens end a
generation, since files rarely name more than one. Those rules are llama.cpp's, which is what files
are made for (src/llama-vocab.cpp, `llama_vocab::impl::load`), except that a token which the file
calls control always stays one: llama.cpp makes four of gpt-oss's user-defined, to have them
printed, and then a user's text can contain them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from strata_nb.gguf import GGUFFile
from strata_nb.metadata import Metadata
from strata_nb.text import pretokenizers
from strata_nb.text.pretokenizers import PreTokenizer

MODELS = {"gpt2": "byte-level BPE", "llama": "SPM"}
MAX_TOKEN_BYTES = 4096  # real ones have a few hundred; some work here is quadratic in this length
NO_TOKEN = (2**32 - 1, 2**64 - 1)  # how some converters write the id -1

_MODEL = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_SCORES = "tokenizer.ggml.scores"
_MERGES = "tokenizer.ggml.merges"

_BYTE_TEXT = re.compile("<0x[0-9A-Fa-f]{2}>")
_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
_END_OF_MESSAGE = ("<|eom_id|>",)
_ENDS = (
    *_END_OF_TURN,
    *_END_OF_MESSAGE,
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
)
# Fill-in-the-middle: prefix, suffix and middle are control tokens, the others are ends as well.
_FILL_CONTROL = (
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜>"
    " <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜>"
    " <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜>"
    " <MID> ▁<MID> <|code_middle|> <|middle|>",
)
_FILL_ENDS = (
    ("fim_pad", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("fim_rep", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("fim_sep", ("<|file_sep|>",)),
)


class TokenKind(IntEnum):
    """Name the kinds of tokens by their numbers in the file."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Hold what a file says about its tokens, checked and completed.

    model          "gpt2" (byte-level BPE) or "llama" (SPM)
    texts          of each token; bytes that are not UTF-8 are lone surrogates
    kinds          uint8, one TokenKind per token
    scores         float64, one per token (SPM: the higher, the earlier merged)
    merges         BPE: "left right", most important first
    words          BPE: how text is cut before merging
    end_ids        the tokens that end a generation
    space_prefix   SPM: a space goes before each text
    strip_left,    special tokens that swallow the white space of ASCII before, after them
    strip_right
    warnings       what was odd and how it was settled, one line each
    """

    model: str
    texts: list[str]
    kinds: NDArray[np.uint8]
    scores: NDArray[np.float64]
    merges: list[str]
    words: PreTokenizer
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    pad_id: int | None
    unk_id: int | None
    end_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    space_prefix: bool
    strip_left: frozenset[int]
    strip_right: frozenset[int]
    warnings: list[str]


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Return the vocabulary of a file; FileFormatError if it has none that can be used."""
    metadata = file.metadata
    warnings: list[str] = []
    model = _read_model(metadata)
    texts = metadata.texts(_TOKENS)
    if not texts:
        raise metadata.error(_TOKENS, "holds no tokens")
    _check_lengths(metadata, texts)
    kinds = _read_kinds(metadata, texts)
    words = _read_words(metadata, warnings) if model == "gpt2" else pretokenizers.DEFAULT
    special = _SpecialTokens(metadata, texts, kinds, warnings)

    # llama.cpp takes token 11 for BOS and EOS of BPE where the file is silent, a comma in most
    # vocabularies, and would end at it. Here there is none then.
    is_spm = model == "llama"
    bos_id, eos_id = (
        special.by_key(name, token if is_spm else None) for name, token in (("bos", 1), ("eos", 2))
    )
    unk_id = special.by_key("unknown", 0 if is_spm else None)
    pad_id = special.by_key("padding", None)
    add_bos = metadata.boolean("tokenizer.ggml.add_bos_token", is_spm or words.add_bos)
    add_eos = metadata.boolean("tokenizer.ggml.add_eos_token", False)
    for name, wanted, token in (("BOS", add_bos, bos_id), ("EOS", add_eos, eos_id)):
        if wanted and token is None:
            warnings.append(f"the file wants {name} added to texts and does not say which it is")
    eot_id = special.by_key_or_text("eot", _END_OF_TURN)
    eom_id = special.by_key_or_text("eom", _END_OF_MESSAGE)
    end_ids = special.ends(eos_id, eot_id, eom_id)
    strip_left, strip_right = _stripping(metadata, texts, kinds)
    return Vocabulary(
        model=model,
        texts=texts,
        kinds=kinds,
        scores=_read_scores(metadata, len(texts), required=is_spm),
        merges=[] if is_spm else metadata.texts(_MERGES),
        words=words,
        bos_id=bos_id,
        eos_id=eos_id,
        eot_id=eot_id,
        pad_id=pad_id,
        unk_id=unk_id,
        end_ids=end_ids,
        add_bos=add_bos and bos_id is not None,
        add_eos=add_eos and eos_id is not None,
        space_prefix=metadata.boolean("tokenizer.ggml.add_space_prefix", is_spm) and is_spm,
        strip_left=strip_left,
        strip_right=strip_right,
        warnings=warnings,
    )


def _read_model(metadata: Metadata) -> str:
    model = metadata.text(_MODEL)
    if model not in MODELS:
        supported = ", ".join(f"{name} ({kind})" for name, kind in MODELS.items())
        raise metadata.error(
            _MODEL,
            f"{model!r} is not supported",
            hint=f"supported are: {supported}",
        )
    return model


def _check_lengths(metadata: Metadata, texts: list[str]) -> None:
    if max(map(len, texts)) * 4 <= MAX_TOKEN_BYTES:  # UTF-8 has up to 4 bytes a character
        return
    for token, text in enumerate(texts):
        size = len(text.encode("utf-8", "surrogateescape"))
        if size > MAX_TOKEN_BYTES:
            raise metadata.error(
                _TOKENS,
                f"token {token} is {size:,} bytes long ({text[:16]!r}...), at most"
                f" {MAX_TOKEN_BYTES:,} are supported",
                hint="the file is damaged or made to do harm: fetch the model from its publisher",
            )


def _read_words(metadata: Metadata, warnings: list[str]) -> PreTokenizer:
    name = metadata.text(_PRE, "")
    words = pretokenizers.find(name)
    if words is None:
        known = f"unknown pre-tokenizer {name!r}" if name else "the file names no pre-tokenizer"
        warnings.append(f"{known}: 'default' is used, and some texts may be cut wrongly")
        return pretokenizers.DEFAULT
    return words


def _read_kinds(metadata: Metadata, texts: list[str]) -> NDArray[np.uint8]:
    kinds = metadata.integers(_TYPES, None)
    if kinds is None:
        return np.full(len(texts), TokenKind.NORMAL, np.uint8)
    _check_count(metadata, _TYPES, kinds.size, len(texts))
    strange = np.flatnonzero((kinds < 0) | (kinds > max(TokenKind)))
    if strange.size:
        raise metadata.error(
            _TYPES,
            f"token {strange[0]} is of type {kinds[strange[0]]}, known are 0 to {max(TokenKind):d}",
        )
    for token in np.flatnonzero(kinds == TokenKind.BYTE):
        if not _BYTE_TEXT.fullmatch(texts[token]):
            raise metadata.error(
                _TYPES, f"token {token} stands for a byte, and its text is {texts[token]!r}"
            )
    return kinds.astype(np.uint8)


def _read_scores(metadata: Metadata, count: int, *, required: bool) -> NDArray[np.float64]:
    scores = metadata.reals(_SCORES, None)
    if scores is None:
        if required:
            raise metadata.error(_SCORES, "an SPM vocabulary cannot be used without scores")
        return np.zeros(count)
    _check_count(metadata, _SCORES, scores.size, count)
    return scores


def _check_count(metadata: Metadata, key: str, found: int, tokens: int) -> None:
    if found != tokens:
        raise metadata.error(
            key,
            f"holds {found} values for {tokens} tokens",
            hint="the file was put together wrongly: convert the model again",
        )


class _SpecialTokens:
    """Find special tokens by the file's keys or their texts; those found by text become control."""

    def __init__(
        self,
        metadata: Metadata,
        texts: list[str],
        kinds: NDArray[np.uint8],
        warnings: list[str],
    ) -> None:
        self._metadata = metadata
        self._kinds = kinds
        self._warnings = warnings
        self._ids = {text: token for token, text in enumerate(texts)}
        self._texts = texts

    def by_key(self, name: str, default: int | None) -> int | None:
        """Return the id under `tokenizer.ggml.NAME_token_id`, or the default if there is none."""
        key, count = f"tokenizer.ggml.{name}_token_id", len(self._texts)
        token = self._metadata.integer(key, None, low=-1, high=2**64 - 1)
        if token is None:
            return default if default is not None and default < count else None
        if token == -1 or token in NO_TOKEN:
            return None
        if token >= count:
            if name == "padding":  # nothing is ever padded here, and many old files are wrong
                self._warnings.append(f"{key} is {token}, of {count} tokens: ignored")
                return None
            raise self._metadata.error(key, f"is {token}, and there are {count} tokens")
        return token

    def by_text(self, texts: tuple[str, ...]) -> int | None:
        """Return the first token that has one of these texts."""
        for text in texts:
            token = self._ids.get(text)
            if token is not None:
                self._kinds[token] = TokenKind.CONTROL
                return token
        return None

    def by_key_or_text(self, name: str, texts: tuple[str, ...]) -> int | None:
        token = self.by_key(name, None)
        return self.by_text(texts) if token is None else token

    def ends(self, *named: int | None) -> frozenset[int]:
        """Return all tokens that end a generation, the `named` ones among them."""
        for texts in _FILL_CONTROL:
            self.by_text(tuple(texts.split()))
        ends = {self.by_key_or_text(name, texts) for name, texts in _FILL_ENDS}
        ends |= {self.by_text((text,)) for text in _ENDS}
        ends |= set(named)
        found = {self._texts[token] for token in ends if token is not None}
        # Harmony and Solar end a message, not the answer, with <|end|>.
        if found >= {"<|return|>", "<|call|>"} or (
            "<|flush|>" in found and not found.isdisjoint({"<|call|>", "<|calls|>"})
        ):
            ends.discard(self._ids.get("<|end|>"))
        return frozenset(token for token in ends if token is not None)


def _stripping(
    metadata: Metadata, texts: list[str], kinds: NDArray[np.uint8]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the tokens that swallow spaces to their left and right: known by names of models."""
    if metadata.text(_PRE, "").startswith(("jina-v2-de", "jina-v2-es", "jina-v2-code")):
        return frozenset(token for token, text in enumerate(texts) if text == "<mask>"), frozenset()
    name = metadata.text("general.name", "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset(), frozenset()
    special = np.flatnonzero(
        np.isin(kinds, (TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED))
    )
    keeping = ("<unk>", "<s>", "<|endoftext|>")
    return frozenset(), frozenset(int(t) for t in special if texts[t] not in keeping)
