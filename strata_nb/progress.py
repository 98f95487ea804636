"""What long work tells, and whom."""

from __future__ import annotations

from collections.abc import Callable

# (done, of how many): bytes, functions, tokens. Called often, so it must be cheap.
Progress = Callable[[int, int], object]

Say = Callable[[str], object]  # a line for the user
