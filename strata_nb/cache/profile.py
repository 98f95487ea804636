"""Remember which experts a kind of text uses most, in a file that the next start fills slots from.

The format is STRP, version 1, little-endian:

    offset  0  "STRP"
            4  uint32 x 5    version, layers, experts of a layer, slots, ranked
           24  uint16 x 2    layer and expert, `ranked` times, hottest first
            .  int32         layers x experts: the rank of each expert, -1 where it has none

`slots` is how many slots the ranking was made for; a ranking is never longer. The second table
follows from the first, and a file where it does not is refused.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from strata_nb.errors import ConfigError, FileFormatError
from strata_nb.whole_files import whole_file

MAGIC = b"STRP"
VERSION = 1
MOST_OF_EACH = 1 << 16  # layers, and experts of a layer, that 16 bits can name

_HEADER = struct.Struct("<4s5I")
_PAIR = np.dtype("<u2")
_RANK = np.dtype("<i4")


@dataclass(frozen=True)
class Profile:
    """Rank experts.

    layers, experts   of the model
    ranked            uint16 (n, 2): layer and expert, hottest first, none twice
    slots             that the ranking was made for, n or more
    """

    layers: int
    experts: int
    ranked: npt.NDArray[np.uint16]
    slots: int

    def order(self) -> list[tuple[int, int]]:
        """Return (layer, expert), hottest first."""
        return [(int(layer), int(expert)) for layer, expert in self.ranked]

    def ranks(self) -> npt.NDArray[np.int32]:
        """Return the rank of each expert, int32 (layers, experts), -1 where it has none."""
        ranks = np.full((self.layers, self.experts), -1, np.int32)
        ranks[self.ranked[:, 0], self.ranked[:, 1]] = np.arange(len(self.ranked))
        return ranks


def rank_by_use(use: npt.NDArray[np.integer], prior: Profile | None = None) -> Profile:
    """Rank all experts by how often they were used (layers, experts), hottest first.

    Equal counts keep the order of `prior`, which must be of the same model, then of layer and
    number: what was learned before is not lost on experts that this run did not need.
    """
    layers, experts = use.shape
    if max(layers, experts) > MOST_OF_EACH:
        raise ConfigError(
            f"an expert profile of {layers} layers of {experts} experts: the format holds "
            f"{MOST_OF_EACH:,} of each"
        )
    earlier = np.arange(use.size)
    if prior is not None:
        ranks = prior.ranks().reshape(-1)
        earlier = np.where(ranks >= 0, ranks, use.size + earlier)
    order = np.lexsort((earlier, -use.reshape(-1).astype(np.int64)))
    pairs = np.stack(np.divmod(order, experts), axis=1).astype(np.uint16)
    return Profile(layers, experts, pairs, use.size)


def save_profile(path: str | os.PathLike[str], profile: Profile) -> None:
    """Write a profile; a reader sees the old file or the new one, never a part. Raises OSError."""
    sizes = (profile.layers, profile.experts, profile.slots, len(profile.ranked))
    with whole_file(path) as file:
        file.write(_HEADER.pack(MAGIC, VERSION, *sizes))
        file.write(profile.ranked.astype(_PAIR).tobytes())
        file.write(profile.ranks().astype(_RANK).tobytes())


def load_profile(path: str | os.PathLike[str], layers: int, experts: int) -> Profile:
    """Read the profile of a model with `layers` layers of `experts` experts.

    Raises FileFormatError for everything that `save_profile` would not have written, and OSError.
    """
    data = Path(path).read_bytes()
    if len(data) < _HEADER.size:
        message = f"{len(data)} bytes, the header alone has {_HEADER.size}"
        raise FileFormatError(path, 0, message, hint="not an expert profile, or cut off")
    magic, version, *sizes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FileFormatError(path, 0, f"begins with {magic!r}, not {MAGIC!r}: no expert profile")
    if version != VERSION:
        raise FileFormatError(path, 4, f"version {version}, only {VERSION} is known")
    found_layers, found_experts, slots, ranked = sizes
    if (found_layers, found_experts) != (layers, experts):
        raise FileFormatError(
            path,
            8,
            f"made for {found_layers} layers of {found_experts} experts, "
            f"the model has {layers} of {experts}",
            hint="give the profile of this model, or none",
        )
    if ranked > min(slots, layers * experts):
        message = f"{ranked:,} ranked experts, of {slots:,} slots and {layers * experts:,} experts"
        raise FileFormatError(path, 20, message)
    table_offset = _HEADER.size + ranked * 2 * _PAIR.itemsize
    end = table_offset + layers * experts * _RANK.itemsize
    if len(data) != end:
        raise FileFormatError(path, min(len(data), end), f"{len(data):,} bytes, should be {end:,}")
    pairs = np.frombuffer(data, _PAIR, 2 * ranked, _HEADER.size).reshape(ranked, 2)
    _check_pairs(path, pairs, layers, experts)
    profile = Profile(layers, experts, pairs.astype(np.uint16), slots)
    table = np.frombuffer(data, _RANK, layers * experts, table_offset)
    wrong = np.flatnonzero(table != profile.ranks().reshape(-1))
    if wrong.size:
        at = table_offset + int(wrong[0]) * _RANK.itemsize
        raise FileFormatError(path, at, f"rank {table[wrong[0]]} disagrees with the list")
    return profile


def _check_pairs(
    path: str | os.PathLike[str], pairs: npt.NDArray[np.uint16], layers: int, experts: int
) -> None:
    """Refuse experts that the model does not have, and experts that are ranked twice."""
    wrong = np.flatnonzero((pairs[:, 0] >= layers) | (pairs[:, 1] >= experts))
    number = pairs[:, 0].astype(np.int64) * experts + pairs[:, 1]
    if not wrong.size:
        _, first = np.unique(number, return_index=True)
        wrong = np.setdiff1d(np.arange(len(pairs)), first)
    if wrong.size:
        at = int(wrong[0])
        layer, expert = pairs[at]
        raise FileFormatError(
            path,
            _HEADER.size + at * 2 * _PAIR.itemsize,
            f"rank {at} is expert {expert} of layer {layer}: not there, or ranked twice",
        )
