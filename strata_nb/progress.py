"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

# (done, of how many): bytes, functions, tokens. Called often, so it must be cheap.
Progress = Callable[[int, int], object]
