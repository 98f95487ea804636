"""Choose how bytes are multiplied on this processor.

STRATA_NB_CPU_PATH forces one of the paths: for tests, and for finding out whether a path is at
fault. The choice is made once, when this module is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum

import llvmlite.binding

from strata_nb.errors import ConfigError

VARIABLE = "STRATA_NB_CPU_PATH"


class Path(Enum):
    """Name a way to multiply bytes, fastest first."""

    AVX512_VNNI = "avx512_vnni"
    AVX_VNNI = "avx_vnni"
    AVX2 = "avx2"
    GENERIC = "generic"


# Features (LLVM's names) that a path needs, all of one set.
_NEEDS: dict[Path, tuple[frozenset[str], ...]] = {
    Path.AVX512_VNNI: (frozenset({"avx512bw", "avx512vl", "avx512vnni", "f16c", "fma"}),),
    Path.AVX_VNNI: (
        frozenset({"avx2", "avxvnni", "f16c", "fma"}),
        frozenset({"avx2", "avx512vl", "avx512vnni", "f16c", "fma"}),
    ),
    Path.AVX2: (frozenset({"avx2", "f16c", "fma"}),),
    Path.GENERIC: (frozenset(),),
}


def choose(features: Mapping[str, bool], forced: str = "") -> Path:
    """Return the fastest path that the processor's features allow, or the forced one.

    ConfigError if the forced path has no such name or the processor cannot run it.
    """
    able = [
        path
        for path, sets in _NEEDS.items()
        if any(all(features.get(name, False) for name in needed) for needed in sets)
    ]
    if not forced:
        return able[0]
    for path in able:
        if path.value == forced:
            return path
    raise ConfigError(
        f"{VARIABLE}={forced} cannot be used on this processor",
        hint=f"it can run {', '.join(path.value for path in able)}",
    )


PATH = choose(llvmlite.binding.get_host_cpu_features(), os.environ.get(VARIABLE, ""))
