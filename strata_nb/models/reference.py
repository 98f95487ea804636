"""The judge: an open model that computes float32 logits by its architecture's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from strata_nb.errors import ConfigError
from strata_nb.kernels.reference import Floats, Integers
from strata_nb.models.description import Description
from strata_nb.models.state import ReferenceState
from strata_nb.models.weights import Weights


class Forward(Protocol):
    """Compute logits (wanted rows, vocab) of the tokens `ids` (rows,) behind a state's cells."""

    def __call__(
        self, model: Description, w: Weights, state: ReferenceState, ids: Integers, wanted: slice
    ) -> Floats: ...


class ReferenceModel:
    """Compute logits in float32 over dequantised weights; the file stays open as long as it does.

    A model has no state of its own: several states may be used in turn.

    description   what the file says about the model
    kept          how much of the weights is kept as float32
    warnings      what will be slow about that, one line each
    forced        int16 (layers, context, top_k): experts that each position uses, whatever the
                  routers say; None: what they say. For states that are made from then on
    """

    forced: npt.NDArray[np.int16] | None = None

    def __init__(self, description: Description, weights: Weights, forward: Forward) -> None:
        self.description = description
        self.kept = weights.kept
        self.warnings = weights.kept.warnings
        self._weights = weights
        self._forward = forward

    def new_state(
        self, ctx_size: int, cache_type_k: str = "f32", cache_type_v: str = "f32"
    ) -> ReferenceState:
        """Return an empty K/V cache for at most `ctx_size` tokens; types: f32, f16, int8."""
        return ReferenceState(self.description, ctx_size, cache_type_k, cache_type_v, self.forced)

    def forward(
        self, ids: Sequence[int], state: ReferenceState, want: Literal["all", "last"]
    ) -> Floats:
        """Read tokens and return float32 logits: (len(ids), vocab), or (1, vocab) for the last one.

        The state then holds len(ids) more cells. After an error or an interrupt it holds what it
        held before. How a text is cut into calls changes the logits by float32 rounding only.
        ConfigError: no ids, an id outside the vocabulary, or more tokens than cells are left.
        """
        if len(ids) == 0:
            raise ConfigError("no tokens to read", hint="give one or more")
        left = state.ctx_size - state.length
        if len(ids) > left:
            raise ConfigError(
                f"{len(ids)} tokens do not fit: {left} of {state.ctx_size} cells are left",
                hint="give a larger --ctx-size or a shorter text",
            )
        self.description.check_ids(ids)
        wanted = slice(None) if want == "all" else slice(-1, None)
        rows = np.asarray(ids, np.int64)
        # Weights that are not numbers show in the logits, where sampling and scoring refuse them.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            logits = self._forward(self.description, self._weights, state, rows, wanted)
        state.advance(len(ids))
        return logits
