"""Run docs/tour.md: every command and every block of Python, and compare what they print.

A fenced block of `sh` or `python` is run, in the order of the document and in one folder; the
block of `text` that follows it is everything it prints. Where there is none, it prints nothing.
The blocks of Python share one interpreter.

What is shown must be what is printed, character by character, but for what `VARYING` names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[1] / "docs" / "tour.md"
HANGS_S = 300  # a block that takes so long will never end
END_OF_BLOCK = "\x1e"

# What differs between two runs or two machines, and nothing else does: a number with one of these
# units behind it, and an address.
VARYING = re.compile(r"[\d,.]+(?= (?:tok/s|s|ms)\b)|0x[0-9a-f]+")
FOLDER = "/home/you/tour"  # is written for the folder that the tour is run in
# The first start on a machine says that it compiles; later ones do not.
COMPILING = re.compile(r"(?m)^compiling \d+ kernel.*\n")


@dataclass(frozen=True)
class Block:
    """Hold one block to run: where it begins in the document, and what it shall print."""

    line: int
    language: str
    code: str
    shown: str


def read_tour(text: str) -> list[Block]:
    """Return the blocks to run; a block that would never be run or compared is refused."""
    blocks: list[Block] = []
    may_be_shown = False  # only directly behind a block that was run
    for found in re.finditer(r"(?m)^```(.*)\n((?s:.*?))^```$", text):
        language, content = found[1], found[2]
        line = text.count("\n", 0, found.start()) + 1
        if language == "text" and may_be_shown:
            last = blocks.pop()
            blocks.append(Block(last.line, last.language, last.code, content))
        elif language in ("sh", "python"):
            blocks.append(Block(line, language, content, ""))
        else:
            raise ValueError(f"line {line}: a block of {language!r} that nothing runs")
        may_be_shown = language != "text"
    return blocks


def masked(text: str, folder: str = FOLDER) -> str:
    """Return a text without what may differ from run to run."""
    return VARYING.sub("~", COMPILING.sub("", text.replace(folder, FOLDER)))


def run_tour(blocks: list[Block], folder: Path) -> dict[int, str]:
    """Run all blocks; returns what each printed, by its line in the document."""
    commands = folder / "commands"
    home = folder / "tour"
    commands.mkdir()
    home.mkdir()
    for name, words in (("strata_nb", "-m strata_nb "), ("python", "")):
        script = commands / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        script.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(TOUR.parents[1]),
        "LC_ALL": "C",
    }

    def printed(*command: str) -> str:
        return subprocess.run(
            command,
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=HANGS_S,
            check=False,
            text=True,
        ).stdout

    shell = [block for block in blocks if block.language == "sh"]
    outputs = {block.line: printed("bash", "-c", block.code) for block in shell}
    python = [block for block in blocks if block.language == "python"]
    ends = f"print({END_OF_BLOCK!r}, end='', flush=True)\n"
    parts = printed(sys.executable, "-c", ends.join(block.code for block in python))
    for block, part in zip(python, parts.split(END_OF_BLOCK), strict=False):
        outputs[block.line] = part
    return {line: masked(output, str(home)) for line, output in outputs.items()}


BLOCKS = read_tour(TOUR.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return run_tour(BLOCKS, tmp_path_factory.mktemp("tour"))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.line}")
def test_a_block_of_the_tour_prints_what_is_shown(block: Block, outputs: dict[int, str]) -> None:
    assert outputs.get(block.line, "was never reached") == masked(block.shown)


def test_every_number_that_is_shown_is_compared_unless_it_may_vary(
    outputs: dict[int, str],
) -> None:
    compared = 0
    for block in BLOCKS:
        varying = [found.span() for found in VARYING.finditer(block.shown)]
        for number in re.finditer(r"0x[0-9a-f]+|\d[\d,.]*", block.shown):
            last = number.end() - 1
            other = "1" if block.shown[last] != "1" else "2"
            wrong = block.shown[:last] + other + block.shown[last + 1 :]
            may_vary = any(first <= last < end for first, end in varying)
            noticed = masked(wrong) != outputs[block.line]
            assert noticed != may_vary, f"line {block.line}: {number[0]} at {number.start()}"
            compared += noticed
    assert compared > 200


def test_only_times_rates_addresses_the_folder_and_compiling_may_vary() -> None:
    assert masked("compiling 4 kernels for this processor\nin 1.31 s, 80.2 tok/s, 3 ms\n") == (
        "in ~ s, ~ tok/s, ~ ms\n"
    )
    assert masked("map at 0x7f5e286c0000, size 65,536") == "map at ~, size 65,536"
    assert masked("wrote /there/run.html", "/there") == f"wrote {FOLDER}/run.html"
    kept = "81 slots, 6.1 MiB, 40.2% hits, 4 steps, 3 seconds left, code 999"
    assert masked(kept) == kept


@pytest.mark.parametrize("text", ["```text\n1\n```\n", "```json\n1\n```\n", "```\n1\n```\n"])
def test_a_block_that_nothing_would_run_or_compare_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line 1: a block"):
        read_tour(text)
