"""`strata_nb tokenize`: show the tokens of a text."""

from __future__ import annotations

from strata_nb.commands.arguments import Arguments, options_from, text_from
from strata_nb.commands.terminal import warn
from strata_nb.errors import ConfigError
from strata_nb.gguf import GGUFFile
from strata_nb.tokenizer import Tokenizer


def run(arguments: Arguments) -> int:
    """Print the ids on one line, or a line per token: id, piece. Returns 0."""
    text = text_from(arguments, "TEXT")
    if text is None:
        raise ConfigError("no text given", hint='-p "TEXT", -f FILE, or -f - for stdin')
    with GGUFFile.open(options_from(arguments).model_path()) as file:
        tokenizer = Tokenizer.from_gguf(file)
    for warning in tokenizer.warnings:
        warn(warning)
    ids = tokenizer.encode(
        text,
        add_special=arguments.flag("--add-special"),
        parse_special=arguments.flag("--parse-special"),
    )
    if arguments.flag("--ids"):
        print(*ids)
        return 0
    width = len(str(max(ids, default=0)))
    for token in ids:
        piece = tokenizer.piece(token, special=True)
        try:
            shown = repr(piece.decode())
        except UnicodeDecodeError:
            shown = repr(piece)  # part of a character: as bytes
        print(f"{token:>{width}}  {shown}")
    return 0
