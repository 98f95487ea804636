"""Compile what programs launch before a model is loaded: in several processes at the first start.

Run as a module, this is one of the other processes.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence

from strata_nb import loading_loop
from strata_nb.compiling import Compiled, cache_folder
from strata_nb.compiling_processes import compile_together, processes_for, serve
from strata_nb.kernels.host import threads
from strata_nb.kernels.host.functions import host_kernel
from strata_nb.kernels.host.operations import Work
from strata_nb.kernels.program import Launch, Program
from strata_nb.packing import PACKED, packer
from strata_nb.progress import Progress, Say

_MODULE = "strata_nb.kernels.host.ahead"
_MOST_PROCESSES = 8  # the longest function takes an eighth of the time of all
# What takes longest comes first, so that no process is left with it at the end. Beginnings of
# names; the others take about as long as each other.
_LONGEST = ("attention.", "prompt.", "window.", "embedding.")


def compile_ahead(
    programs: Sequence[Program],
    *,
    progress: Progress | None = None,
    say: Say = lambda _: None,
) -> None:
    """Compile what programs launch and what loading needs, unless it is at hand.

    `progress` is told of functions compiled, `say` of the wait. Addresses in the programs are not
    looked at. ConfigError if the machine code cannot be written to disk.
    """
    launches = _first_of_each(launch for program in programs for launch in program)
    functions = {one.name: one for one in _functions(launches)}
    missing = [one for one in functions.values() if not one.is_at_hand()]
    if not missing:
        return
    missing.sort(key=_rank)
    processes = processes_for(len(missing), _MOST_PROCESSES)
    together = f", in {processes} processes" if processes > 1 else ""
    kernels = "1 kernel" if len(missing) == 1 else f"{len(missing)} kernels"
    say(f"compiling {kernels} for this processor, once{together}: up to half a minute")
    compile_together(
        missing,
        processes,
        _MODULE,
        pickle.dumps(launches),
        cache_folder(),
        progress=progress,
        say=say,
    )


def _rank(function: Compiled) -> int:
    for rank, beginning in enumerate(_LONGEST):
        if function.name.startswith(beginning):
            return rank
    return len(_LONGEST)


def _first_of_each(launches: Iterable[Launch]) -> list[Launch]:
    """Return launches, each of which needs a function that those before it do not."""
    chosen: list[Launch] = []
    known: set[int] = set()
    for launch in launches:
        needed = {id(one) for one in _of_launch(launch)}  # which are kept, each made once
        if not needed <= known:
            chosen.append(launch)
            known |= needed
    return chosen


def _functions(launches: Iterable[Launch]) -> Iterator[Compiled]:
    """Yield what is needed to load a model and to run these launches."""
    yield from loading_loop.FUNCTIONS
    yield from threads.FUNCTIONS
    for launch in launches:
        yield from _of_launch(launch)


def _of_launch(launch: Launch) -> Iterator[Compiled]:
    """Yield what a launch calls, and what packs the weights that it reads."""
    kernel = host_kernel(launch, Work(0, 0))
    yield from (one for one in kernel.functions() if isinstance(one, Compiled))
    kinds = launch.variant if isinstance(launch.variant, tuple) else (launch.variant,)
    yield from (packer(kind) for kind in kinds if kind in PACKED)


def _of_request(request: bytes) -> Iterator[Compiled]:
    return _functions(pickle.loads(request))


if __name__ == "__main__":
    serve(_of_request, cache_folder)
