"""Render every chat template of a folder with one fixed conversation and print how it went.

Usage:
  try_templates.py DIR

A template that refuses the conversation in its own words is tried again without the system message.
Exit status 1 if one failed: broken for us, as opposed to refusing.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from docopt import docopt

from strata_nb.chat import ChatTemplate, Message
from strata_nb.errors import TemplateError
from strata_nb.text.template_sandbox import Refusal

CONVERSATION: list[Message] = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of <b>Italy</b>? Grüße, 'it' & \"all\""},
]


def outcome(source: str, messages: list[Message]) -> tuple[str, str]:
    """Return "ok", "refused" or "FAILED", and the number of characters or the message."""
    try:
        text = ChatTemplate(source, bos="<s>", eos="</s>", origin="it").render(messages)
    except TemplateError as error:
        word = "refused" if isinstance(error.__cause__, Refusal) else "FAILED"
        return word, error.message
    return "ok", f"{len(text)} characters"


def main() -> int:
    """Print a line for each template and the counts."""
    arguments = docopt(__doc__ or "")
    counts: Counter[str] = Counter()
    for path in sorted(Path(arguments["DIR"]).glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        word, detail = outcome(source, CONVERSATION)
        if word == "refused":
            word, more = outcome(source, CONVERSATION[1:])
            word = "ok without system" if word == "ok" else word
            detail = f"{detail}; then {more}"
        counts[word] += 1
        print(f"{word:18} {path.name:56} {detail}")
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
