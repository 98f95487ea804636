"""Measure how long files and vocabularies take to open, and long texts to encode.

Usage:
  files_and_text.py [--model=FILE]
  files_and_text.py --help

Options:
  --model=FILE  also load this model for the device reference, as `generate` does

Each figure is the median of 5 runs in this process, with the fastest and the slowest. A vocabulary
is one of tests/data/vocab; the texts are 100,000 characters. Figures go to
bench/results/files_and_text.json.
"""

from __future__ import annotations

import lzma
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from results import write_result  # noqa: E402 - tools/ is no package

from strata_nb import Engine, Options  # noqa: E402
from strata_nb.gguf import GGUFFile  # noqa: E402
from strata_nb.tokenizer import Tokenizer  # noqa: E402

RUNS = 5
CHARACTERS = 100_000
TEXTS = {
    "one letter": "a" * CHARACTERS,
    "spaces": " " * CHARACTERS,
    "blank lines": "\n" * CHARACTERS,
    "digits": "7" * CHARACTERS,
    "emoji": "\N{LLAMA}" * CHARACTERS,
    "signs": "=" * CHARACTERS,
}


def timed(action: Callable[[], object]) -> dict[str, float]:
    """Return the seconds that an action takes."""
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


def open_file(path: Path) -> None:
    """Open a file and let it go."""
    with GGUFFile.open(path):
        pass


def build_tokenizer(path: Path) -> Tokenizer:
    """Open a file and build its tokenizer."""
    with GGUFFile.open(path) as file:
        return Tokenizer.from_gguf(file)


def load(path: str) -> None:
    """Load a model for the device reference."""
    with Engine.open(Options(path, "reference")):
        pass


def main() -> None:
    """Measure, print a table, and write the figures."""
    model = docopt(str(__doc__))["--model"]
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for packed in sorted((ROOT / "tests" / "data" / "vocab").glob("*.gguf.xz")):
            path = Path(folder) / packed.stem
            path.write_bytes(lzma.decompress(packed.read_bytes()))
            name = path.stem
            rows[f"{name}: open the file"] = timed(lambda path=path: open_file(path))  # type: ignore[misc]
            rows[f"{name}: open and build the tokenizer"] = timed(
                lambda path=path: build_tokenizer(path)  # type: ignore[misc]
            )
            tokenizer = build_tokenizer(path)
            for kind, text in TEXTS.items():
                rows[f"{name}: encode {CHARACTERS:,} characters, {kind}"] = timed(
                    lambda tokenizer=tokenizer, text=text: tokenizer.encode(text)  # type: ignore[misc]
                )
    if model:
        rows[f"{Path(model).name}: load as float32"] = timed(lambda: load(model))
    print("| what | median s | min | max |\n|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['median_s']:.3f} | {row['min_s']:.3f} | {row['max_s']:.3f} |")
    given = f" --model={Path(model).name}" if model else ""
    write_result(
        "files_and_text",
        f"seconds, {RUNS} runs each",
        f"python bench/files_and_text.py{given}",
        {"runs": RUNS, "rows": rows},
        ("numpy", "tokenizers"),
    )


if __name__ == "__main__":
    main()
