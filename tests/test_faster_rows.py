"""Kernels that are tried beside those of a single row (`bench/faster_rows.py`)."""

from __future__ import annotations

import gpu_simulator
import kernel_references as plain
import numpy as np
import pytest
from faster_rows import EXPERTS
from gpu_launches import aligned, simulate
from host_launches import normal, same_bits
from numpy.typing import NDArray
from try_faster_rows import Shape, Trial, chain_of, contents, sizes_of, trials, weights_of

from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.compile import cubin_of

SMALL = Shape(width=512, queries=1024, keys=64)  # what one and two warps have two tiles each of
FEW = 40  # outputs of a product that are computed: five groups
READ = ("norm", "shares", "sources")
RESULTS = ("x", "queries", "keys", "values")
TRIED = ("qkv", "attn_output", "down")


def of_few_outputs(one: CardLaunch) -> CardLaunch:
    few = {name: FEW for name in one.arguments if name[:7] == "outputs"}
    return one._replace(arguments={**one.arguments, **few})


def results(trial: Trial) -> dict[str, NDArray[np.float32]]:
    """Run what trials are for, behind the norm of the row; return what came to be."""
    arrays = {name: aligned(np.zeros(size, np.uint8)) for name, size in sizes_of(SMALL).items()}
    for name, array in contents(SMALL).items():
        arrays[name][:] = array.view(np.uint8)
    arrays["packed_queries"][:] = plain.quantised(normal(1, SMALL.queries, seed=1)).ravel()
    arrays["packed_inner"][:] = plain.quantised(normal(EXPERTS, SMALL.inner, seed=2)).ravel()
    weights = {part: aligned(weights_of(SMALL, part)) for part in SMALL.parts}
    blob = aligned(np.concatenate([weights[part] for part in ("gate", "up", "down")]))
    blobs = aligned(np.full(EXPERTS, blob.ctypes.data))
    of = {part: int(array.ctypes.data) for part, array in weights.items()}
    of["blobs"] = int(blobs.ctypes.data)
    at = {name: int(array.ctypes.data) for name, array in arrays.items()}
    written = [array for name, array in arrays.items() if name not in READ]
    read = [*(arrays[name] for name in READ), *weights.values(), blob, blobs]
    norm, *launches = chain_of(SMALL, trial._replace(norms_last=False), at, [of])
    for one in (norm, *launches):
        if one is norm or one.label.rpartition(".")[2] in TRIED:
            # What is left out between them is no launch in front: each has memory at rest.
            simulate(of_few_outputs(one), 1, gpu_simulator.Memory(written, read))
    return {name: arrays[name].view(np.float32) for name in RESULTS}


@pytest.fixture(scope="module")
def ours() -> dict[str, NDArray[np.float32]]:
    return results(trials(SMALL)[0])


@pytest.mark.parametrize("trial", trials(SMALL)[1:], ids=lambda one: one.name)
def test_a_trial_has_the_bits_of_our_kernels(
    trial: Trial, ours: dict[str, NDArray[np.float32]]
) -> None:
    found = results(trial)
    if trial.attn_output is not None and trial.attn_output.tiles != 2:
        np.testing.assert_allclose(found["x"], ours["x"], rtol=1e-3, atol=1e-3)
        return
    for name in RESULTS:
        assert same_bits(found[name], ours[name]), name


def test_kernels_that_are_tried_fit_their_registers() -> None:
    shape = Shape()
    of, at = dict.fromkeys((*shape.parts, "blobs"), 0), dict.fromkeys(sizes_of(shape), 0)
    launches = [one for trial in trials(shape)[-1:] for one in chain_of(shape, trial, at, [of])]
    kernels = {one.kernel.name: one for one in launches if one.kernel.name.startswith("try_")}
    assert len(kernels) == len(("normed", "row", "down"))
    for one in kernels.values():
        assert cubin_of(one.kernel, one.kinds, "sm_90").spill_bytes == 0, one.kernel.name
