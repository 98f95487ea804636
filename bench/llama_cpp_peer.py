"""Drive llama.cpp in a process of its own, each case with the settings that are fastest for it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

Settings = dict[str, Any]  # fields of an order, see llama_cpp_worker.py

LOADS: tuple[Settings, ...] = (
    {"mapped": True, "repacked": True},
    {"mapped": False, "repacked": True},
    {"mapped": True, "repacked": False},
)
DEFAULT_CONTEXT: Settings = {"flash": True, "rows": 512}
PROMPT_CONTEXTS: list[Settings] = [
    {"flash": flash, "rows": rows} for flash, rows in product((True, False), (128, 512, 2048))
]
DECODE_CONTEXTS: list[Settings] = [{"flash": flash, "rows": 512} for flash in (True, False)]


@dataclass(frozen=True, slots=True)
class Case:
    """Say what is measured: reading `before` tokens, or decoding `tokens` after them."""

    before: int
    tokens: int = 0  # 0: the prompt is what is measured

    @property
    def name(self) -> str:
        """The case in words."""
        return f"decode after {self.before}" if self.tokens else f"prompt of {self.before}"

    @property
    def measured(self) -> int:
        """The number of tokens that the time belongs to."""
        return self.tokens or self.before

    @property
    def contexts(self) -> list[Settings]:
        """The settings of a context that may make a difference."""
        return DECODE_CONTEXTS if self.tokens else PROMPT_CONTEXTS


class Peer:
    """Hold the process in which llama.cpp runs; `ids` are what the cases read, from the first on.

    about     versions, and what llama.cpp says of its build
    load      the way of loading that `tune` chose; `contexts` its choice for each case
    """

    def __init__(
        self, python: str, model: Path, ids: Sequence[int], cells: int, threads: int
    ) -> None:
        worker = Path(__file__).parent / "llama_cpp_worker.py"
        self._process = subprocess.Popen(
            [python, str(worker), str(model), str(cells), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ids = list(ids)
        self.about = self._answer()
        self.load: Settings = {}
        self.contexts: dict[Case, Settings] = {}

    def tune(self, cases: Sequence[Case], tries: int) -> None:
        """Try all settings; stay loaded with the best, and remember the best context of each case.

        The way of loading is one for all cases: the one with the least product of their times.
        """
        totals = []
        for load in LOADS:
            print(f"llama.cpp: trying {load}", file=sys.stderr)
            self._order("load", **load)
            self._order("context", **DEFAULT_CONTEXT)
            totals.append(math.prod(self._least(case, tries) for case in cases))
        self.load = LOADS[totals.index(min(totals))]
        self._order("load", **self.load)
        for case in cases:
            print(f"llama.cpp: trying settings, {case.name}", file=sys.stderr)
            times = []
            for context in case.contexts:
                self._order("context", **context)
                times.append(self._least(case, tries))
            self.contexts[case] = case.contexts[times.index(min(times))]
        self._order("load", **self.load)  # once more, to be rid of the contexts that lost

    def prepare(self, case: Case) -> None:
        """Make the context of a case ready."""
        self._order("context", **self.contexts[case])

    def seconds(self, case: Case) -> float:
        """Measure a case in the context that was prepared."""
        ids = self._ids[: case.before]
        if case.tokens:
            return self._order("decode", ids=ids, tokens=case.tokens)
        return self._order("prompt", ids=ids)

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process used so far."""
        return self._order("rest")

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.communicate()  # closes its standard input: there are no more orders

    def _least(self, case: Case, tries: int) -> float:
        return min(self.seconds(case) for _ in range(tries))

    def _order(self, order: str, **fields: Any) -> float:
        if self._process.stdin is None:
            raise AssertionError("the process was started with a pipe")
        self._process.stdin.write(json.dumps({"do": order, **fields}) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["s"])

    def _answer(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise AssertionError("the process was started with a pipe")
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"llama.cpp's process ended with status {self._process.wait()}\n"
                "hint: --llama-python names an interpreter that has llama-cpp-python"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer
