"""Write down for a device how the token of a row is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from strata_nb.kernels.choices import CHOICE, MOST_BANNED, MOST_RECENT, WHOLE, offset
from strata_nb.options import Sampling
from strata_nb.sampling import Choice, recent_tokens

_RANDOM, _RECENT, _ENTRY_BYTES = offset("random"), offset("recent"), 8
_COLDEST = np.float32(2.0**-100)  # below, divisions would lose what tells tokens apart


def write_choices(records: npt.NDArray[Any], how: Sequence[Choice]) -> bool:
    """Write choices into as many records of `kernels/choices.py`.

    Returns whether they have room for all that the choices say: at most 1,024 different recent
    tokens that have a penalty, and 64 that are banned. If not, the host must choose.
    """
    data = records.view(np.uint8).reshape(len(how), CHOICE.itemsize)
    for number, choice in enumerate(how):
        beginning = _beginning(choice.sampling, frozenset(choice.banned))
        if beginning is None:
            return False
        data[number, :_RECENT] = beginning
        randoms = data[number, _RANDOM : _RANDOM + 4].view(np.int32)
        randoms[0] = int(choice.random * WHOLE)
        recent = recent_tokens(choice.history, choice.sampling)
        if len(recent) and not _write_recent(records[number : number + 1], recent):
            return False
    return True


def used_bytes(records: npt.NDArray[Any]) -> int:
    """Return how many bytes of records a device has to know: lists have room that is not used."""
    last = int(records["recent_count"][-1])
    return CHOICE.itemsize * (len(records) - 1) + _RECENT + _ENTRY_BYTES * last


@lru_cache(maxsize=64)
def _beginning(sampling: Sampling, banned: frozenset[int]) -> npt.NDArray[np.uint8] | None:
    """Return a record up to its recent tokens, of which it has none; None without room.

    From one token of an answer to the next only the random number changes.
    """
    if len(banned) > MOST_BANNED:
        return None
    record = np.zeros(1, CHOICE)
    warm = max(np.float32(sampling.temperature), _COLDEST)
    record["temperature"] = warm if sampling.temperature > 0 else 0
    record["least"] = np.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    for name in ("repeat_penalty", "presence_penalty", "frequency_penalty", "top_k"):
        record[name] = getattr(sampling, name)
    record["top_p"] = int(sampling.top_p * WHOLE)
    record["banned_count"] = len(banned)
    record["banned"][:, : len(banned)] = sorted(banned)
    found: npt.NDArray[np.uint8] = record.view(np.uint8)[:_RECENT]
    found.flags.writeable = False
    return found


def _write_recent(record: npt.NDArray[Any], recent: Sequence[int]) -> bool:
    """Write into an array of one record the tokens that penalties look at, if there is room."""
    ids, counts = np.unique(np.asarray(recent, np.int64), return_counts=True)
    if len(ids) > MOST_RECENT:
        return False
    record["recent_count"] = len(ids)
    record["recent"][:, : len(ids), 0] = ids
    record["recent"][:, : len(ids), 1] = counts
    return True
