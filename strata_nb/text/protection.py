"""Keep control tokens out of what users write.

A mark, a non-character, follows each sign with which a control token begins, in keys as well as in
values, whether a control token stands there or not: then none comes about either when a template
changes the case of a text, cuts it or removes a part of it. The tokenizer takes the marks out again
after it has parsed the template's own control tokens. Escaping the text instead would change what
the model reads.

Names of letters, digits, _ and - (keys, roles and types) stay as they are, because templates look
for them. A control token that begins with a letter, a digit or a space is broken only where it, or
a beginning of it at the end of a text, stands: marks behind every letter would hide all words from
the template.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from strata_nb.errors import ConfigError, TemplateError

NAME = re.compile(r"[A-Za-z0-9_-]+")

# Templates cut the reasoning out of earlier answers at these, so an answer keeps them whole.
ANSWER_TEXTS = frozenset({"<think>", "</think>"})

# Non-characters, so nobody's text, and how each is spelled in an escape and in an address.
_MARKS = {chr(code): (f"u{code:04x}", quote(chr(code)).lower()) for code in range(0xFDD0, 0xFDF0)}


def protect(conversation: Any, control_texts: Iterable[str]) -> tuple[Any, str]:
    """Return a copy with a mark inside each control token's text, and the mark.

    `conversation` is nested lists and dicts: the messages, alone or with tools and documents. The
    mark is a non-character that occurs nowhere in it, nor do its codes. In messages of the
    assistant it leaves `<think>` and `</think>` whole. Keys, and values of `role` and `type`, stay
    as they are if they are letters, digits, _ and -: templates look for them. Raises ConfigError if
    all 32 non-characters are in use.
    """
    texts = sorted({text for text in control_texts if text})
    everything = "\n".join((*_strings(conversation), *texts)).lower()
    free = (
        mark
        for mark, codes in _MARKS.items()
        if not any(spelling in everything for spelling in (mark, *codes))
    )
    if (mark := next(free, None)) is None:
        raise ConfigError(
            "the conversation uses all of the non-characters U+FDD0 to U+FDEF",
            hint="remove them from the text; they stand for nothing",
        )
    anywhere = _Marker(texts, mark)
    in_answer = _Marker([text for text in texts if text not in ANSWER_TEXTS], mark, ANSWER_TEXTS)
    return _marked(conversation, anywhere, in_answer), mark


def marks_restored(text: str, mark: str, origin: str) -> str:
    r"""Return a rendered text with each mark itself, where a printed dict or JSON says \ufdd0.

    Raises TemplateError if another code of the mark is left. The conversation has none, since
    `protect` chose a mark with codes that do not occur in it; `origin` is the template's.
    """
    codes = _MARKS[mark]
    # After an even number of backslashes: each pair of them is one backslash.
    text = re.sub(rf"(?<!\\)((?:\\\\)*)\\{codes[0]}", rf"\g<1>{mark}", text)
    lower = text.lower()
    if any(code in lower for code in codes):
        raise TemplateError(
            f"{origin} writes the conversation in escapes, in which control tokens cannot be told "
            "from text",
            hint="take the texts of control tokens out of the messages, or give another template",
        )
    return text


class _Marker:
    """Insert marks into a text; `texts` of control tokens are sorted, `whole` gets no mark."""

    def __init__(self, texts: Sequence[str], mark: str, whole: Iterable[str] = ()) -> None:
        self._mark = mark
        signs = {text[0] for text in texts if not (text[0].isalnum() or text[0].isspace())}
        # Only the first character is consumed, so that a token beginning inside another is found.
        places = []
        for sign in sorted(signs):
            rests = "|".join(re.escape(text[1:]) for text in sorted(whole) if text[0] == sign)
            places.append(re.escape(sign) + (f"(?!{rests})" if rests else ""))
        self._texts = [text for text in texts if text[0] not in signs]
        self._longest = max(map(len, self._texts), default=0)
        rests_of: dict[str, list[str]] = {}
        for text in self._texts:
            rests_of.setdefault(text[0], []).append(re.escape(text[1:]))
        places += (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests_of.items())
        self._pattern = re.compile("|".join(places) or "(?!)")

    def __call__(self, text: str) -> str:
        cuts = {match.end() for match in self._pattern.finditer(text)}
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if self._begins_a_token(text[start:]):
                cuts.add(start + 1)
        if not cuts:
            return text
        ends = sorted(cuts)
        pieces = (text[start:end] for start, end in zip([0, *ends], [*ends, None], strict=True))
        return self._mark.join(pieces)

    def _begins_a_token(self, tail: str) -> bool:
        at = bisect.bisect_left(self._texts, tail)
        return at < len(self._texts) and self._texts[at].startswith(tail)


def _marked(value: Any, marker: _Marker, in_answer: _Marker) -> Any:
    """Return a copy of nested data with the marker applied to its strings."""
    if isinstance(value, str):
        return marker(value)
    if isinstance(value, Mapping):
        inside = in_answer if value.get("role") == "assistant" else marker
        return {
            _marked_name(key, inside): _marked_name(item, inside)
            if key in ("role", "type")
            else _marked(item, inside, inside)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_marked(item, marker, in_answer) for item in value]
    return value


def _marked_name(name: Any, marker: _Marker) -> Any:
    """Return a key, a role or a type: as it is if it is a name, else with marks."""
    is_name = isinstance(name, str) and NAME.fullmatch(name)
    return name if is_name else _marked(name, marker, marker)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value))
        yield from _strings(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
