"""Command-line arguments: a strict walk before docopt, and typed values after it.

docopt reads the usage text, which is the specification of a command. Three of its habits do not
suit a tool whose flags are typed by hand: it accepts unique prefixes (`--mod` for `--model`), it
exits with status 1, and it reports a mistake by printing the whole usage. So `parse` first walks
the words itself, against the options named in the same usage text, and refuses what is unknown,
abbreviated, doubled or lacks its value, with one line of cause and one line of remedy. Every flag
then reaches docopt in its long spelling; where an option line names two long spellings, the last
one is the name by which the value is kept.

Defaults stand in the usage text as words, "(default 40)", never as docopt's `[default: 40]`, which
would hide whether a flag was given.
"""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import docopt

from strata_nb.errors import ConfigError
from strata_nb.options import Options, Sampling

_FLAG = r"-[^\s,]+(?: [A-Z]+)?"
_OPTION_LINE = re.compile(rf"^  (?P<flags>{_FLAG}(?:, {_FLAG})*)(?:  |$)", re.MULTILINE)

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) *(|[KMGT]i?B?|B)", re.IGNORECASE)


class Option(NamedTuple):
    """Describe one option of a usage text: the name of its value and what may be given."""

    name: str
    takes_value: bool
    repeatable: bool


def options_of(usage: str) -> dict[str, Option]:
    """Return every spelling (`-m`, `--model`) in the option lines of `usage` with its option."""
    found: dict[str, Option] = {}
    for match in _OPTION_LINE.finditer(usage):
        parts = [part.split() for part in match["flags"].split(", ")]
        name = [part[0] for part in parts if part[0].startswith("--")][-1]
        takes_value = any(len(part) == 2 for part in parts)
        repeatable = re.search(rf"\[{name} [A-Z]+\]\.\.\.", usage) is not None
        option = Option(name, takes_value, repeatable)
        found.update((part[0], option) for part in parts)
    return found


def _refuse_unknown(word: str, known: Mapping[str, Option], command: str) -> ConfigError:
    longer = sorted(flag for flag in known if flag.startswith(word))
    if len(word) > 2 and longer:
        return ConfigError(
            f"{word}: abbreviated flags are not accepted", hint="write " + " or ".join(longer)
        )
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"`strata_nb {command} --help` lists the flags"
    return ConfigError(f"{word}: unknown flag of `strata_nb {command}`", hint=hint)


def _normalise(argv: Sequence[str], known: Mapping[str, Option], command: str) -> list[str]:
    """Return `argv` with every flag as `--name` or `--name=value`; refuse what is not a flag."""
    seen: set[str] = set()
    normal: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            return [*normal, word, *words]
        if word == "-" or not word.startswith("-"):
            normal.append(word)
            continue
        flag, equals, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:
            flag, equals, value = word[:2], "=", word[2:].removeprefix("=")  # -n5 is -n 5
        option = known.get(flag)
        if option is None:
            raise _refuse_unknown(word.partition("=")[0], known, command)
        if option.name in seen and not option.repeatable:
            raise ConfigError(f"{flag}: given twice", hint="give it once")
        seen.add(option.name)
        if not option.takes_value:
            if equals:
                raise ConfigError(f"{flag}: takes no value", hint=f"write {flag} alone")
            normal.append(option.name)
            continue
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigError(f"{flag}: a value must follow", hint=f"write {flag} VALUE")
            value = following
        normal.append(f"{option.name}={value}")
    return normal


def _utf8(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name}: not UTF-8 text at character {error.start}",
            hint="check the terminal's encoding, or put the text into a UTF-8 file",
        ) from None
    return text


class Arguments:
    """Hold the parsed arguments of one command; a getter returns None for what was not given."""

    def __init__(
        self, command: str, values: Mapping[str, object], words: Sequence[str] = ()
    ) -> None:
        self.command = command
        self._values = values
        self._words = words

    @property
    def line(self) -> str:
        """The command line, as a shell reads it."""
        return shlex.join(["strata_nb", *self.command.split(), *self._words])

    def text(self, name: str) -> str | None:
        """Return the words given for `name`, refusing bytes that are not UTF-8."""
        value = self._values.get(name)
        if value is None:
            return None
        return _utf8(name, str(value))

    def path(self, name: str) -> str | None:
        """Return a file name; any bytes but an empty or NUL-holding name are accepted."""
        value = self._values.get(name)
        if value is None:
            return None
        if not value or "\0" in str(value):
            raise ConfigError(f"{name}: an empty file name", hint=f"write {name} FILE")
        return str(value)

    def paths(self, name: str) -> list[str]:
        """Return every file name of a repeatable argument."""
        values: Any = self._values.get(name) or []
        for value in values:
            if not value or "\0" in value:
                raise ConfigError(f"{name}: an empty file name", hint=f"write the name of a {name}")
        return [str(value) for value in values]

    def texts(self, name: str) -> list[str]:
        """Return every value of a repeatable option, refusing bytes that are not UTF-8."""
        values: Any = self._values.get(name) or []
        return [_utf8(name, str(value)) for value in values]

    def flag(self, name: str) -> bool:
        """Say whether a switch was given."""
        return bool(self._values.get(name))

    def integer(self, name: str) -> int | None:
        """Return a whole number."""
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            raise ConfigError(f"{name} {text}: not a whole number", hint=f"write {name} 1, say")
        return int(text)

    def real(self, name: str) -> float | None:
        """Return a number; "nan" and "inf" are read and refused where the value is used."""
        text = self.text(name)
        if text is None:
            return None
        try:
            if "_" in text:  # Python's own way to group digits
                raise ValueError(text)
            return float(text)
        except ValueError:
            raise ConfigError(
                f"{name} {text}: not a number", hint=f"write {name} 0.5, say"
            ) from None

    def size_bytes(self, name: str) -> int | None:
        """Return a size such as 12GiB, 700MiB or 64000000."""
        text = self.text(name)
        if text is None:
            return None
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{name} {text}: not a size", hint=f"write {name} 12GiB, say")
        unit = match[2].upper()
        base = 1000 if len(unit) == 2 and unit.endswith("B") else 1024
        return int(float(match[1]) * base ** " KMGT".index((unit or " ")[0].replace("B", " ")))


def parse(command: str, usage: str, argv: Sequence[str]) -> Arguments:
    """Parse `argv` (the words after the command) against `usage`; mistakes raise ConfigError."""
    words = _normalise(argv, options_of(usage), command)
    try:
        values = docopt.docopt(usage, argv=[*command.split(), *words], default_help=False)
    except docopt.DocoptExit:
        plain = re.search(rf"^ +strata_nb {command} *(.*)$", usage, re.MULTILINE)
        raise ConfigError(
            f"these arguments do not fit `strata_nb {command}`",
            hint=f"write: strata_nb {command} {plain[1] if plain else ''}".rstrip(),
        ) from None
    return Arguments(command, values, argv)


def _given(**fields: object) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def options_from(arguments: Arguments, model: str | None = None) -> Options:
    """Return the Options that the flags of `arguments` ask for; `model` stands in for --model."""
    grows, fixed = arguments.flag("--kv-grow"), arguments.flag("--no-kv-grow")
    if grows and fixed:
        raise ConfigError("--kv-grow and --no-kv-grow: both given", hint="give one of them")
    prefill: int | str | None = None
    if arguments.text("--prefill") != "auto":
        prefill = arguments.integer("--prefill")
    pcie_frac: float | str | None = None
    if arguments.text("--pcie-frac") != "auto":
        pcie_frac = arguments.real("--pcie-frac")
    return Options(
        model or arguments.path("--model"),
        **_given(
            device=arguments.text("--device"),
            ctx_size=arguments.integer("--ctx-size"),
            threads=arguments.integer("--threads"),
            prefill=prefill,
            cache_type_k=arguments.text("--cache-type-k"),
            cache_type_v=arguments.text("--cache-type-v"),
            expert_cache=arguments.text("--expert-cache"),
            vram_reserve_mib=arguments.integer("--vram-reserve-mib"),
            vram_limit=arguments.size_bytes("--vram-limit"),
            vram_elastic=arguments.flag("--vram-elastic"),
            kv_grow=grows if grows or fixed else None,
            kv_grow_init=arguments.integer("--kv-grow-init"),
            kv_grow_step=arguments.integer("--kv-grow-step"),
            deterministic=arguments.flag("--deterministic"),
            overlap=not arguments.flag("--no-overlap"),
            prefill_borrow=not arguments.flag("--no-prefill-borrow"),
            adapt=arguments.text("--adapt"),
            adapt_every=arguments.integer("--adapt-every"),
            adapt_swaps=arguments.integer("--adapt-swaps"),
            adapt_decay=arguments.real("--adapt-decay"),
            cpu_pool=not arguments.flag("--no-cpu-pool"),
            pin=not arguments.flag("--no-pin"),
            pcie_frac=pcie_frac,
            expert_profile=arguments.path("--expert-profile"),
            expert_profile_save=arguments.path("--expert-profile-save"),
            routing_trace=arguments.path("--routing-trace"),
            force_routes=arguments.path("--force-routes"),
            trace=arguments.path("--trace"),
        ),
    )


def sampling_from(arguments: Arguments) -> Sampling:
    """Return the Sampling that the flags of `arguments` ask for; --seed -1 draws one."""
    seed = arguments.integer("--seed")
    return Sampling(
        **_given(
            temperature=arguments.real("--temp"),
            top_k=arguments.integer("--top-k"),
            top_p=arguments.real("--top-p"),
            min_p=arguments.real("--min-p"),
            repeat_penalty=arguments.real("--repeat-penalty"),
            presence_penalty=arguments.real("--presence-penalty"),
            frequency_penalty=arguments.real("--frequency-penalty"),
            repeat_last_n=arguments.integer("--repeat-last-n"),
            seed=None if seed == -1 else seed,
        )
    )


def read_text_file(flag: str, path: str) -> str:
    """Return the UTF-8 text of a file, `-` for stdin; ConfigError says what is wrong where."""
    if path == "-" and sys.stdin is None:
        raise ConfigError(f"{flag} -: stdin is closed", hint="send a text to stdin")
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: {error.strerror}", hint="check the name and the permissions"
        ) from None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{flag} {path}: not UTF-8 text, byte {content[error.start]:#04x} at offset "
            f"{error.start}",
            hint="convert it to UTF-8",
        ) from None


def text_from(arguments: Arguments, positional: str) -> str | None:
    """Return the text given as a word, with --prompt or with --file; None where none was given."""
    ways = {
        positional: arguments.text(positional),
        "--prompt": arguments.text("--prompt"),
        "--file": arguments.path("--file"),
    }
    given = {way: value for way, value in ways.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(
            f"the text is given more than once: {' and '.join(given)}", hint="give one of them"
        )
    for way, value in given.items():
        return read_text_file(way, value) if way == "--file" else value
    return None
