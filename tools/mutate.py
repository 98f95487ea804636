"""Break the memory manager on purpose, one fault at a time, and see that its tests notice.

Usage:
  mutate.py [--only=TEXT]
  mutate.py --help

Options:
  --only=TEXT   only the faults whose name contains TEXT

Each fault is one change of a line or two, made in a copy of the project; then the tests that ought
to notice are run there. Ends with status 1 if they pass, or if the line to change is not there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from docopt import docopt

ROOT = Path(__file__).parents[1]
VMM = ("tests/test_vmm.py",)
LEDGER = ("tests/test_requests.py", "tests/test_capacity.py", "tests/test_ledger_machine.py")


@dataclass(frozen=True)
class Fault:
    """Replace `old`, which stands once in `file`, by `new`; one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "chunks are created on device 0, whatever the pool's device",
        "strata_nb/vmm.py",
        "self._call(self.driver.create, self.chunk_bytes, self.device)",
        "self._call(self.driver.create, self.chunk_bytes, 0)",
        VMM,
    ),
    Fault(
        "memory that is given back is not released",
        "strata_nb/vmm.py",
        "        error = self._attempt(self.driver.release, handle)\n",
        "        error = None\n",
        VMM,
    ),
    Fault(
        "no access is set for new chunks",
        "strata_nb/vmm.py",
        "            self._grant(first, count)\n",
        "            pass\n",
        VMM,
    ),
    Fault(
        "chunks have the minimum granularity, whatever memory is charged in",
        "strata_nb/vmm.py",
        "return driver.granularity(device, driver.chunk_granularity)",
        'return driver.granularity(device, "minimum")',
        VMM,
    ),
    Fault(
        "a refused path costs the owner its access",
        "strata_nb/vmm.py",
        "for devices in dict.fromkeys((self.devices, owner_only)):",
        "for devices in dict.fromkeys((self.devices,)):",
        VMM,
    ),
    Fault(
        "chunks are unmapped while older work runs",
        "strata_nb/cache/chunks.py",
        "        self._driver.synchronize(self._device)\n",
        "        pass\n",
        LEDGER,
    ),
    Fault(
        "slots are written before the experts that left are drained",
        "strata_nb/cache/chunks.py",
        "            self._experts.make_way(moves)\n            self._drain()\n",
        "            self._experts.make_way(moves)\n",
        LEDGER,
    ),
    Fault(
        "tables name slots that are lost",
        "strata_nb/cache/experts.py",
        "        self._evict(lost[self._owner[lost] != NOBODY])\n        for slot in range(",
        "        for slot in range(",
        LEDGER,
    ),
    Fault(
        "an expert is named before it was copied",
        "strata_nb/cache/experts.py",
        "        self._driver.stream_synchronize(self._stream)\n        self._require",
        "        self._require",
        ("tests/test_experts.py", *LEDGER),
    ),
    Fault(
        "a slot that lies half in memory that is lost is used",
        "strata_nb/cache/slots.py",
        "rounds * self.layers + bisect_right(self._ends, rest))",
        "rounds * self.layers + bisect_right(self._ends, rest) + 1)",
        LEDGER,
    ),
    Fault(
        "experts leave by place and not by heat",
        "strata_nb/cache/experts.py",
        "        return choose_moves(of_slot, kept, self.layout)\n",
        "        return {}\n",
        LEDGER,
    ),
    Fault(
        "experts leave by use, whatever the policy says",
        "strata_nb/cache/capacity.py",
        "self.heat if heat is None else lambda: heat)",
        "self.experts.heat)",
        ("tests/test_residency.py",),
    ),
    Fault(
        "growth beside windows takes what experts have",
        "strata_nb/cache/requests.py",
        "count = max(0, min(limit - held.kv, held.spare + now.obtainable))",
        "count = max(0, min(limit - held.kv, held.spare + now.obtainable + now.arena_gives))",
        ("tests/test_requests.py",),
    ),
    Fault(
        "experts give more than they must keep",
        "strata_nb/cache/requests.py",
        "self.held.experts - self.plan.floor_chunks)",
        "self.held.experts)",
        LEDGER,
    ),
    Fault(
        "memory that is lent is taken away",
        "strata_nb/cache/requests.py",
        "        return 0 if self.held.loan else max(",
        "        return max(",
        LEDGER,
    ),
    Fault(
        "what is to stay free for others is taken",
        "strata_nb/cache/capacity.py",
        "memory.free_bytes - self.reserve_bytes  #",
        "memory.free_bytes  #",
        LEDGER,
    ),
    Fault(
        "live K/V blocks are lost when the K/V is cut",
        "strata_nb/cache/kv.py",
        "            self._driver.copy_async(self._address(new), self._address(old), size,",
        "            self._driver.copy_async(self._address(old), self._address(old), size,",
        LEDGER,
    ),
    Fault(
        "a failed change is not taken back",
        "strata_nb/cache/chunks.py",
        "            self._undo(before)\n            raise\n",
        "            raise\n",
        LEDGER,
    ),
    Fault(
        "a path is believed without a look at what came over it",
        "strata_nb/peer_paths.py",
        "            if wrong:\n",
        "            if wrong < 0:\n",
        ("tests/test_peer_paths.py",),
    ),
)


def main() -> None:
    """Make each fault and run the tests that ought to notice."""
    only = docopt(str(__doc__))["--only"] or ""
    unnoticed = [fault.name for fault in FAULTS if only in fault.name and not noticed(fault)]
    for name in unnoticed:
        print(f"NOT NOTICED: {name}")
    raise SystemExit(bool(unnoticed))


def noticed(fault: Fault) -> bool:
    """Return whether a test fails in a copy of the project with this fault."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("strata_nb", "tests", "tools", "docs"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "setup.cfg", copy)
        path = copy / fault.file
        path.write_text(broken(fault, path.read_text(encoding="utf-8")), encoding="utf-8")
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests]
        run = subprocess.run(words, cwd=copy, capture_output=True, text=True, check=False)
    failures = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print(f"{fault.name}:\n    {failures[0] if failures else 'all tests pass'}", flush=True)
    return run.returncode == 1 and bool(failures)


def broken(fault: Fault, source: str) -> str:
    """Return the source with the fault in it; ValueError where its place is not found once."""
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {source.count(fault.old)} places in {fault.file}")
    return source.replace(fault.old, fault.new)


if __name__ == "__main__":
    main()
