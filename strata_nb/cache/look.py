"""Look at a ledger's chunks, for people: whose each is, and how much is going on in it.

It reads the tables that kernels read and nothing else, between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Look:
    """Say what a device's chunks were like at one moment.

    chunks            by owner: "kv", "experts", "loan", "spare", "stuck", "given_back"
    kv_cells, free_cells   that there is memory for, and that no sequence holds
    growths           of the K/V since the start
    slots             of experts
    hits, misses      choices of experts since the start
    filled            missed experts that the device brought to slots itself
    use               int64 (layers, experts): how often each was chosen
    resident          int64 (n, 2): layer and expert of those in slots
    offsets, sizes    int64 (n,): where their bytes are in the arena
    blocks            int64: where the K/V blocks begin that sequences hold, of `block_bytes`
    by_cpu            missed experts that the CPU computed, of which a ledger knows nothing
    """

    chunk_bytes: int
    chunks: dict[str, int]
    kv_cells: int
    free_cells: int
    growths: int
    slots: int
    hits: int
    misses: int
    filled: int
    use: Numbers
    resident: Numbers
    offsets: Numbers
    sizes: Numbers
    blocks: Numbers
    block_bytes: int
    by_cpu: int = 0

    def arena_heat(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return for each chunk of the arena the sum of the values of experts with bytes in it.

        values   float64 (layers, experts)
        """
        heat = np.zeros(self.chunks["experts"])
        here = values[self.resident[:, 0], self.resident[:, 1]]
        first = self.offsets // self.chunk_bytes
        last = (self.offsets + self.sizes - 1) // self.chunk_bytes
        for step in range(int((last - first).max(initial=-1)) + 1):
            inside = (first + step <= last) & (first + step < len(heat))
            np.add.at(heat, (first + step)[inside], here[inside])
        return heat

    def kv_fill(self) -> npt.NDArray[np.float64]:
        """Return for each chunk of the K/V the share of its bytes that sequences hold."""
        fill = np.zeros(self.chunks["kv"])
        for start in self.blocks.tolist():
            at, end = start, start + self.block_bytes
            while at < end:
                chunk = at // self.chunk_bytes
                until = min(end, (chunk + 1) * self.chunk_bytes)
                if chunk < len(fill):
                    fill[chunk] += until - at
                at = until
        return fill / self.chunk_bytes
