"""Merge the characters of plain text into the tokens of an SPM (SentencePiece BPE) vocabulary.

SPM has no list of merges: two neighbours join wherever the result is a token, the token with the
highest score first, and of equal scores the leftmost. A character that ends up in no token is
spelled in byte tokens, and is unknown where these are missing.

Written as a list of merges for `tokenizers` (every split of every token, ordered by score), two
different tokens cannot have the same rank, so which is leftmost would not count. In trained
vocabularies each token has a score of its own, but for runs of spaces, with which both orders end
in the same tokens (that is tried). Any other vocabulary with equal scores is encoded here, several
times slower, and so is one of many long tokens, whose list of merges would fill the memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import chain

from tokenizers import Tokenizer, models

from strata_nb.text.merging import Encode, plain_tokens, replace_stand_ins
from strata_nb.text.vocabulary import Vocabulary

SPACE = "▁"  # stands for a space in all texts of the vocabulary
# The splits of a token hold the square of its length in characters: 1 million in all in Llama 2's
# vocabulary, for which a list of merges is made up to this many.
MAX_SPLIT_CHARACTERS = 1 << 26
MAX_TIED_RUN = 64  # spaces: Llama 2 has 16; the trial of both orders is quadratic in it
_BYTE_TEXTS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def sentencepiece(vocabulary: Vocabulary, warnings: list[str]) -> Encode:
    """Build the encoder of an SPM vocabulary; a line in `warnings` if it cannot spell all bytes."""
    tokens = plain_tokens(vocabulary)
    spelling = _Spelling(vocabulary)
    if spelling.missing:
        warnings.append(
            f"{spelling.missing} of the 256 bytes have no token: characters outside the vocabulary"
            + (" become the unknown token" if spelling.unknown else " are lost")
        )
    scores = dict(zip(tokens, vocabulary.scores[list(tokens.values())].tolist(), strict=True))
    tied = _tied(scores)
    trial = range(0)
    if tied and set("".join(tied)) == {SPACE} and max(map(len, tied)) <= MAX_TIED_RUN:
        trial = range(2 * max(map(len, tied)) + 1)
    if (tied and not trial) or sum(len(text) ** 2 for text in tokens) > MAX_SPLIT_CHARACTERS:
        return _by_leftmost(tokens, scores, spelling)
    by_ranks = _by_ranks(tokens, scores, spelling, first_free=len(vocabulary.texts))
    by_leftmost = _by_leftmost(tokens, scores, spelling)
    agree = all(by_ranks(SPACE * length) == by_leftmost(SPACE * length) for length in trial)
    return by_ranks if agree else by_leftmost


class _Spelling:
    """Spell characters in byte tokens; `missing` says how many of the 256 there are not."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.unknown = () if vocabulary.unk_id is None else (vocabulary.unk_id,)
        self.tokens = {
            text: token for token, text in enumerate(vocabulary.texts) if text in _BYTE_TEXTS
        }
        self.missing = 256 - len(self.tokens)

    def ids(self, character: str) -> tuple[int, ...]:
        """Return the byte tokens of a character, or the unknown token if there is one."""
        texts = [f"<0x{byte:02X}>" for byte in character.encode()]
        if all(text in self.tokens for text in texts):
            return tuple(self.tokens[text] for text in texts)
        return self.unknown


def _tied(scores: dict[str, float]) -> list[str]:
    """Return the tokens that can compete with another one of the same score."""
    joined = [text for text in scores if len(text) > 1]
    times = Counter(scores[text] for text in joined)
    return [text for text in joined if times[scores[text]] > 1]


def _by_ranks(
    tokens: dict[str, int], scores: dict[str, float], spelling: _Spelling, first_free: int
) -> Encode:
    """Encode with `tokenizers`; characters that are only parts of tokens get stand-ins."""
    letters = set(chain.from_iterable(tokens)).difference(tokens)
    stand_ins, known = {}, dict(tokens)
    for token, letter in enumerate(sorted(letters), first_free):
        known[letter] = token
        stand_ins[token] = spelling.ids(letter)
    ranked = sorted(tokens, key=lambda text: (-scores[text], tokens[text]))
    merges = [
        (left, right)
        for text in ranked
        for cut in range(1, len(text))
        if (left := text[:cut]) in known and (right := text[cut:]) in known
    ]
    # The byte tokens are where `tokenizers` looks for them; no merge leads there.
    known |= spelling.tokens
    unknown_text = None
    if spelling.unknown:
        unknown_text = "\ufdd0unknown"  # never the text of a character
        known[unknown_text] = spelling.unknown[0]
    model = models.BPE(known, merges, byte_fallback=True, unk_token=unknown_text)
    tokenizer = Tokenizer(model)

    def encode(text: str) -> list[int]:
        return replace_stand_ins(tokenizer.encode(text, add_special_tokens=False).ids, stand_ins)

    return encode


def _by_leftmost(tokens: dict[str, int], scores: dict[str, float], spelling: _Spelling) -> Encode:
    """Encode with a queue of the pairs that can join, the leftmost of the best first."""

    def encode(text: str) -> list[int]:
        symbols = list(text)  # a joined pair stands in its first place, its second is empty
        before = [-1, *range(len(text) - 1)] if text else []
        after = [*range(1, len(text)), -1] if text else []
        queue: list[tuple[float, int, int, int]] = []

        def consider(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                joined = symbols[left] + symbols[right]
                if joined in scores:
                    heapq.heappush(queue, (-scores[joined], left, right, len(joined)))

        for right in range(1, len(symbols)):
            consider(right - 1, right)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            joined = symbols[left] + symbols[right]
            if not symbols[left] or not symbols[right] or len(joined) != length:
                continue  # one of the two has been joined to another since
            symbols[left], symbols[right] = joined, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            consider(before[left], left)
            consider(left, after[left])
        spelled = ((tokens[s],) if s in tokens else spelling.ids(s) for s in symbols if s)
        return list(chain.from_iterable(spelled))

    return encode
