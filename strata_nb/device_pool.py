"""Let the CPU compute some of the experts that a card misses, and say how many.

A card that misses experts reads them over its link, which is slower than the host's memory. The
CPU reads that memory at the same time, so it computes some of them where they are (`cpu_pool.py`,
`kernels/gpu/pooled.py`). Both end at the same time if each has a share as large as its rate; the
plan of a window says which (`fill_plans.py`).

The share begins with what link and CPU do alone (`link_rate.py`, `pool_rate.py`). Both read the
same memory, so while they run it follows what is measured: how long the card needs for its part of
the layers with posts, and how long the pool for its own. It leans to the link: who crosses that may
stay on the card. `--pcie-frac F` fixes it.

A card that waits too long for an answer gives up, once, and says so with the window, whose rows are
then read again: a process that was stopped for a while (Ctrl-Z) goes on with its text. From then on
all missed experts go over the link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb.backend import Backend
from strata_nb.compiling import Compiled
from strata_nb.cpu_pool import CpuPool, PoolLayer, pool_threads
from strata_nb.errors import DeviceLost, StrataError
from strata_nb.fill_plans import SHARE_UNITS
from strata_nb.formats import row_bytes
from strata_nb.kernels import pool_state
from strata_nb.kernels.gpu.pooled import PoolPlaces
from strata_nb.kernels.host import pool as host_pool
from strata_nb.kernels.host.matrices import matrix_functions
from strata_nb.kernels.host.operations import Function
from strata_nb.link_rate import link_rate
from strata_nb.models.description import Description
from strata_nb.models.places import ExpertPart
from strata_nb.models.tensors import EXPERT_PARTS
from strata_nb.options import Options
from strata_nb.packing import GROUP_ROWS, UNPACKED
from strata_nb.pool_rate import pool_rate

WINDOWS = 16  # after which the share follows what was measured
FOLLOWS = 0.25  # of the way to what would have been right for those
# Times the share with which both end at the same time. In replays of routes like those of text,
# with 10 to 50% of the experts in slots, tokens took 1 to 3% less with it than without.
LEANS = 0.9
LEAST_POSTS = 64  # of these windows; fewer say little
# Windows with few posts, after which the share is again what it began with: a share so small that
# the CPU gets nothing, because other programs kept it busy for a while, would stay for good.
FORGETS = 256


class NoAnswer(StrataError):
    """Say that the results of a window are wrong, because the CPU did not answer: no other one's
    will be."""


class Served(NamedTuple):
    """Say what the CPU did since the start.

    experts, bytes   that it computed with, in windows that count: none that was dropped or repeated
    waited_s         that the card waited for it
    """

    experts: int
    bytes: int
    waited_s: float


class DevicePool:
    """Wake a pool for windows and set its share; call under the model's lock.

    share   of the missed of a row, in parts of SHARE_UNITS, that the next window leaves to the CPU
    """

    def __init__(
        self,
        pool: CpuPool,
        share: float,
        say: Callable[[str], None],
        *,
        follows: bool,
        is_alone: bool = False,
    ) -> None:
        """`share` is 0 to 1.

        follows    it changes with what is measured
        is_alone   the card reads no memory of the host: where the pool stops, so does the model
        """
        self.share = _in_units(share)
        self._pool, self._say, self._follows, self._is_alone = pool, say, follows, is_alone
        self._exact = self._first = share
        self._is_on = True
        self._windows = 0  # since the share was looked at
        self._seen = np.zeros(pool_state.WORDS, np.int64)
        self._latest = self._seen.copy()
        self._dropped = 0  # choices of windows that do not count
        self._seen_busy_s = 0.0

    def awake(self) -> None:
        """Have the threads look for posts: a window begins.

        StrataError where they have stopped, and nobody else serves misses.
        """
        if self._is_on:
            self._pool.awake()
        elif self._is_alone:
            raise StrataError(
                "the CPU stopped computing the experts without a slot, which the card cannot read "
                "(--no-pin)",
                hint="open the model again",
            )

    def rest(self) -> None:
        """Let the threads sleep soon: nothing is in flight."""
        self._pool.rest()

    def landed(self, words: npt.NDArray[np.int64]) -> None:
        """Take the state of the card behind a window, which has ended.

        words   int64 (WORDS,), of `pool_state`

        NoAnswer, once, where the window waited in vain: its results are wrong.
        """
        if not self._is_on:
            return
        error = int(words[pool_state.ERROR // 8])
        if error:
            self.dropped(words)
            self._give_up(error)
        self._latest = words.copy()
        self._windows += 1
        if self._windows >= WINDOWS and self._follows:
            self._follow()

    def dropped(self, words: npt.NDArray[np.int64]) -> None:
        """Take the state of the card behind a window that does not count; nothing is in flight."""
        if self._is_on:
            place = pool_state.CHOICES // 8
            self._dropped += int(words[place] - self._latest[place])
            self._latest = words.copy()

    def served(self) -> Served:
        """Return what the CPU did in windows that landed; one may be in flight.

        Of bytes only those of all windows are known: the threads may be ahead of what landed.
        """
        experts = int(self._latest[pool_state.CHOICES // 8]) - self._dropped
        size_bytes = self._pool.bytes * experts // max(1, self._pool.experts)
        return Served(experts, size_bytes, int(self._latest[pool_state.WAITED_NS // 8]) * 1e-9)

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._pool.close()

    def _give_up(self, error: int) -> None:
        self._is_on, self.share = False, 0
        if error == pool_state.LATE:
            why = f"no answer within {pool_state.DEADLINE_NS * 1e-9:.0f} s"
        else:
            why = "no answer, and told it to wait no longer"
        found = self._pool.failure
        why = f"{why}: {found}" if found else why
        if self._is_alone:
            raise StrataError(
                f"the card waited for experts that only the CPU can compute (--no-pin), and there "
                f"was {why}",
                hint="open the model again",
            )
        self._say(f"the card computes all experts from now on: the CPU gave {why}")
        raise NoAnswer(
            f"the card waited for experts that the CPU computes, and there was {why}",
            hint="read the rows again: from now on the card computes all of them",
        )

    def _follow(self) -> None:
        """Move the share towards what would have had both end at the same time."""
        new, busy_s = self._latest - self._seen, self._pool.busy_s - self._seen_busy_s
        is_little = new[pool_state.POSTS // 8] < LEAST_POSTS
        if is_little and self._windows < FORGETS:
            return
        self._windows, self._seen = 0, self._latest
        self._seen_busy_s += busy_s
        if is_little:
            self._exact = max(self._exact, self._first)
            self.share = _in_units(self._exact)
            return
        alone_s = int(new[pool_state.ALONE_NS // 8]) * 1e-9
        by_link, by_cpu = (
            int(new[place // 8]) for place in (pool_state.BESIDE, pool_state.CHOICES)
        )
        if alone_s <= 0 or busy_s <= 0 or not by_link:
            return
        link, cpu = by_link / alone_s, by_cpu / busy_s
        self._exact += FOLLOWS * (LEANS * cpu / (cpu + link) - self._exact)
        self.share = _in_units(self._exact)


# A card's launches are captured at the start. Those that share with the CPU cost a model that has a
# slot for each expert time in each layer, for nothing, so they are not captured where all fit.
NO_POOL_YET = (
    "experts have lost their slots, and the CPU computes none of them: when the model was opened "
    "there was a slot for each; to share with the CPU, open it with fewer (--expert-cache)"
)

Parts = Sequence[Mapping[str, ExpertPart]]  # of each layer, by the names of `EXPERT_PARTS`


def why_no_pool(options: Options, parts: Parts) -> str | None:
    """Return why a device that misses experts leaves none to the CPU; None where it does."""
    if not options.cpu_pool:
        return "--no-cpu-pool"
    if options.deterministic:
        return "--deterministic"
    if options.pcie_frac != "auto" and float(options.pcie_frac) == 1:
        return "--pcie-frac 1"
    if pool_threads(options.threads) == 0:
        return "fewer than three processors"
    if any(part.kind in UNPACKED for of_layer in parts for part in of_layer.values()):
        return "experts of floats"
    return None


def pool_places(backend: Backend[Any], model: Description, parts: Parts) -> PoolPlaces:
    """Have programs that are compiled from now on leave missed experts to the CPU."""
    downs = [of_layer[EXPERT_PARTS[2]].kind for of_layer in parts]
    idle_bytes = max(GROUP_ROWS * row_bytes(kind, model.expert_width) for kind in downs)
    return backend.open_pool(model.width, -(-idle_bytes // 256) * 256)


def compile_pool(parts: Parts, say: Callable[[str], None]) -> None:
    """Compile what the threads call, unless it is at hand."""
    kinds = {part.kind for of_layer in parts for part in of_layer.values()}
    functions: list[Function] = [
        *host_pool.FUNCTIONS,
        *(matrix_functions(kind).few for kind in sorted(kinds)),
    ]
    missing = [one for one in functions if isinstance(one, Compiled) and not one.is_at_hand()]
    if missing:
        functions_text = "1 function" if len(missing) == 1 else f"{len(missing)} functions"
        say(f"compiling {functions_text} of the CPU pool for this processor, once")
    for one in missing:
        one.made()


def open_device_pool(
    backend: Backend[Any],
    places: PoolPlaces,
    layers: Sequence[PoolLayer],
    options: Options,
    top_k: int,
    say: Callable[[str], None],
) -> DevicePool:
    """Start a pool for a device whose programs know of it; all experts are loaded.

    Measures link and CPU where the share is to be measured. StrataError where threads cannot be
    started.
    """
    threads = pool_threads(options.threads)
    follows = options.pin and options.pcie_frac == "auto"
    if not options.pin:
        share = 1.0
    elif follows:
        # Half of what a row uses: more is rarely posted at once.
        share = _first_share(backend, layers, threads, max(1, top_k // 2), say)
    else:
        share = 1 - float(options.pcie_frac)
    pool = CpuPool(places.box, layers, threads)
    return DevicePool(pool, share, say, follows=follows, is_alone=not options.pin)


def _first_share(
    backend: Backend[Any],
    layers: Sequence[PoolLayer],
    threads: int,
    choices: int,
    say: Callable[[str], None],
) -> float:
    """Return the share by what link and CPU do alone; a half where no memory is left to copy to."""
    try:
        link = link_rate(backend.driver, backend.device).bytes_per_s
    except DeviceLost:
        raise
    except StrataError as error:
        say(f"the CPU begins with half of the missed experts: {error.message}")
        return 0.5
    cpu = pool_rate(layers, threads, choices)
    return LEANS * cpu / (cpu + link)


def _in_units(share: float) -> int:
    return round(share * SHARE_UNITS)


def pool_layers(
    parts: Parts, width: int, inner: int, homes: npt.NDArray[np.int64]
) -> list[PoolLayer]:
    """Return what a pool needs of layers.

    homes   (layers, experts): addresses of the blobs, which who calls keeps
    """
    experts = homes.shape[1]
    layers = []
    for layer, of_layer in enumerate(parts):
        gate, up, down = (of_layer[name] for name in EXPERT_PARTS)
        kinds = gate.kind, up.kind, down.kind
        offsets = gate.offset, up.offset, down.offset
        addresses = int(homes.ctypes.data) + 8 * experts * layer
        layers.append(PoolLayer(*kinds, *offsets, width, inner, experts, addresses))
    return layers
