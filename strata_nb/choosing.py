"""Write down for a device how the token of a row is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from strata_nb.kernels.choices import MOST_BANNED, MOST_RECENT, WHOLE
from strata_nb.sampling import Choice, recent_tokens

_COLDEST = np.float32(2.0**-100)  # below, divisions would lose what tells tokens apart


def write_choices(records: npt.NDArray[Any], how: Sequence[Choice]) -> bool:
    """Write choices into as many records of `kernels/choices.py`.

    Returns whether they have room for all that the choices say: at most 1,024 different recent
    tokens that have a penalty, and 64 that are banned. If not, the host must choose.
    """
    places = records.reshape(-1, 1)
    return all(_write(place, choice) for place, choice in zip(places, how, strict=True))


def _write(record: npt.NDArray[Any], choice: Choice) -> bool:
    """Write one, into an array of one record."""
    sampling = choice.sampling
    recent = np.asarray(recent_tokens(choice.history, sampling), np.int64)
    ids, counts = np.unique(recent, return_counts=True)
    banned = sorted(choice.banned)
    if len(ids) > MOST_RECENT or len(banned) > MOST_BANNED:
        return False
    warm = max(np.float32(sampling.temperature), _COLDEST)
    record["temperature"] = warm if sampling.temperature > 0 else 0
    record["least"] = np.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    for name in ("repeat_penalty", "presence_penalty", "frequency_penalty", "top_k"):
        record[name] = getattr(sampling, name)
    record["top_p"] = int(sampling.top_p * WHOLE)
    record["random"] = int(choice.random * WHOLE)
    record["banned_count"], record["recent_count"] = len(banned), len(ids)
    record["banned"][:, : len(banned)] = banned
    record["recent"][:, : len(ids), 0] = ids
    record["recent"][:, : len(ids), 1] = counts
    return True
