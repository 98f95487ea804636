"""Run Mixture-of-Experts language models in pure Python.

    from strata_nb import Engine, Options, Sampling

Importing the package loads nothing heavy: each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata_nb.engine import Engine, Token
    from strata_nb.options import Options, Sampling

__version__ = "0.1.0"
__all__ = ["Engine", "Options", "Sampling", "Token"]


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> object:
    from importlib import import_module

    home = {"Engine": "engine", "Token": "engine", "Options": "options", "Sampling": "options"}
    if name not in home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home[name]}"), name)
