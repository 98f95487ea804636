"""The command line: what is common to all commands.

`main` finds the command, parses its arguments, runs it and turns every failure into one line of
cause, one line of remedy and an exit status:

    0    done
    1    something that was asked for failed
    2    a file, an option or a configuration cannot be used
    130  interrupted (Ctrl-C); what was written so far stands

Commands are imported when they run: `--help` loads neither numpy nor a model.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib import import_module

import strata_nb
from strata_nb.commands.arguments import Arguments, parse
from strata_nb.commands.terminal import one_line
from strata_nb.errors import ConfigError, StrataError
from strata_nb.usage import MAIN_USAGE, USAGE


def _dispatch(argv: Sequence[str]) -> int:
    if not argv:
        raise ConfigError(
            "no command given",
            hint=f"`generate` alone writes a story; --help describes {', '.join(USAGE)}",
        )
    # A command has one word, or two.
    first = 2 if " ".join(argv[:2]) in USAGE else 1
    command, words = " ".join(argv[:first]), argv[first:]
    if command in ("-h", "--help", "--version") and words:
        raise ConfigError(f"{command} {words[0]}: {command} stands alone", hint=f"write {command}")
    if command == "--version":
        print(f"strata_nb {strata_nb.__version__}")
        return 0
    if command in ("-h", "--help") or argv == ["help"]:
        print(MAIN_USAGE, end="")
        return 0
    if command == "help" and " ".join(words) in USAGE:
        print(USAGE[" ".join(words)], end="")
        return 0
    if command not in USAGE:
        asked = " ".join(argv) if command == "help" else command
        kind = "flag" if command.startswith("-") else "command"
        raise ConfigError(f"{asked}: unknown {kind}", hint="commands: " + ", ".join(USAGE))
    arguments: Arguments = parse(command, USAGE[command], words)
    if arguments.flag("--help"):
        print(USAGE[command], end="")
        return 0
    module = import_module(f"strata_nb.commands.{command.replace(' ', '_')}")
    status: int = module.run(arguments)
    return status


def _report(error: BaseException) -> int:
    """Print the cause and the remedy of `error` and return the exit status."""
    if os.environ.get("STRATA_NB_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    if isinstance(error, StrataError):
        cause, hint, status = error.message, error.hint, error.exit_status
    elif isinstance(error, MemoryError):
        cause, hint, status = f"out of memory: {error}", "a smaller --ctx-size or model", 1
    elif isinstance(error, OSError):
        cause, hint, status = str(error), "", 1
    else:
        cause = f"internal error: {type(error).__name__}: {error}"
        hint, status = "a fault of strata_nb; STRATA_NB_DEBUG=1 shows where", 1
    # Only refusals of options have several lines: sums, and none of their text is a file's.
    lines = cause.split("\n") if isinstance(error, ConfigError) else [cause]
    print("strata_nb: " + "\n".join(map(one_line, lines)), file=sys.stderr)
    if hint:
        print(f"hint: {one_line(hint)}", file=sys.stderr)
    return status


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv` (without the program's name) and return the exit status."""
    if sys.stderr is None:  # closed, which asks for silence
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            return main(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed one is None
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        if sys.stdout is None:
            raise ConfigError("stdout is closed", hint="send it to a file or to /dev/null")
        status = _dispatch(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output went away: nothing is left to say, and nothing to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the one place where nothing may pass
        return _report(error)
    return status
