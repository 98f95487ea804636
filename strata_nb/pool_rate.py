"""Measure how fast a CPU pool reads experts, by posting in a card's place.

The figures are of this machine as it is now: other programs read its memory too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_nb.addresses import memory_view
from strata_nb.cpu_pool import CpuPool, PoolLayer
from strata_nb.errors import StrataError
from strata_nb.kernels import mailbox
from strata_nb.kernels.host import pool
from strata_nb.kernels.host.activations import quantise_rows

POSTS = 100


class Poster:
    """Play the card of one pool: write messages to a mailbox of its own, and read answers.

    box      address of the mailbox, valid as long as this lives
    answer   float32 (width,), of the latest post
    """

    def __init__(self, width: int) -> None:
        line = mailbox.LINE
        self._memory = np.zeros(mailbox.box_bytes(width) + line, np.uint8)
        self.box = -(-int(self._memory.ctypes.data) // line) * line
        self._bytes = memory_view(self.box, mailbox.box_bytes(width))
        self._words = self._bytes[: mailbox.ROW].view(np.int64)
        self._clock = np.zeros(2, np.int64)
        start = mailbox.answer_offset(width)
        self.answer: NDArray[np.float32] = self._bytes[start : start + 4 * width].view(np.float32)

    def word(self, offset: int) -> int:
        """Return a word of the mailbox."""
        return int(self._words[offset // 8])

    def write(self, offset: int, value: int) -> None:
        """Write a word of the mailbox."""
        self._words[offset // 8] = value

    def row(self, x: NDArray[np.float32]) -> None:
        """Quantise a row (width,) to its place in the message."""
        quantise_rows(int(x.ctypes.data), self.box + mailbox.ROW, x.size, 0, 1)

    def message(
        self, layer: int, experts: Sequence[int] | NDArray[Any], shares: NDArray[np.float32]
    ) -> None:
        """Write a message but for its row; nobody is told."""
        self.write(mailbox.LAYER, layer)
        self.write(mailbox.COUNT, len(experts))
        for choice, expert in enumerate(experts):
            place = mailbox.CHOICES + choice * mailbox.CHOICE_BYTES
            self.write(place, int(expert))
            self.write(place + mailbox.SHARE, int(shares[choice].view(np.uint32)))

    def post(self) -> None:
        """Post the message and do not wait."""
        self.write(mailbox.POSTED, self.word(mailbox.POSTED) + 1)

    def ask(self) -> int:
        """Post the message and wait for the answer; return nanoseconds, -1 if it was given up."""
        number = self.word(mailbox.POSTED) + 1
        return int(pool.ask(self.box, number, int(self._clock.ctypes.data)))


def measure(
    layers: Sequence[PoolLayer],
    threads: int,
    choices: int,
    *,
    posts: int = POSTS,
    pause_s: float = 0.0,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Return the nanoseconds of each of some posts of so many random experts.

    Each post is for the next layer, whose experts all have addresses. The first posts wake the
    threads and the processor and are not counted. `pause_s` is the least time between an answer
    and the next post. StrataError if the pool fails.
    """
    rng = np.random.default_rng(seed)
    poster = Poster(layers[0].width)
    poster.row(rng.standard_normal(layers[0].width).astype(np.float32))
    shares = np.full(choices, 1 / choices, np.float32)
    found = np.empty(posts + posts // 4, np.int64)
    with closing(CpuPool(poster.box, layers, threads)) as made:
        made.awake()
        for number in range(found.size):
            layer = number % len(layers)
            chosen = rng.choice(layers[layer].experts, choices, replace=False)
            poster.message(layer, np.sort(chosen), shares)
            end = time.perf_counter() + pause_s
            while time.perf_counter() < end:
                pass
            found[number] = poster.ask()
            if found[number] < 0:
                raise StrataError(
                    f"the CPU pool did not answer: {made.failure}", hint="give --no-cpu-pool"
                )
    return found[posts // 4 :]


def pool_rate(layers: Sequence[PoolLayer], threads: int, choices: int = 2) -> float:
    """Return the bytes of experts that a pool computes in a second, at the median of posts."""
    size = choices * layers[0].blob_bytes()
    return size / float(np.median(measure(layers, threads, choices))) * 1e9
