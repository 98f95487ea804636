"""Say how the tokens of rows are chosen where a device does it: a record for each row.

It holds what `sampling.sample` is given beside the logits, in the form that a kernel needs. Lists
have a fixed room; who has more to say leaves the choice to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

MOST_BANNED = 64
MOST_RECENT = 1024  # different ones

SHARE_BITS = 30
WHOLE = 1 << SHARE_BITS

# temperature       above 0; 0: the most likely token
# least             the logarithm of min_p: so much may a logit be below the largest; may be -inf
# repeat_penalty, presence_penalty, frequency_penalty    as options.Sampling has them
# top_k             tokens to keep, 0: all
# top_p, random     in parts of WHOLE, rounded down
# banned_count, recent_count    entries of the lists that are used
# banned            ids that must not be drawn
# recent            ids that the penalties are for, each once, and how often each came
CHOICE = np.dtype(
    [
        ("temperature", np.float32),
        ("least", np.float32),
        ("repeat_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("top_k", np.int32),
        ("top_p", np.int32),
        ("random", np.int32),
        ("banned_count", np.int32),
        ("recent_count", np.int32),
        ("banned", np.int32, MOST_BANNED),
        ("recent", np.int32, (MOST_RECENT, 2)),
    ]
)


def offset(field: str) -> int:
    """Return where a field begins in a record, in bytes."""
    fields: Mapping[str, Any] = CHOICE.fields or {}
    return int(fields[field][1])
