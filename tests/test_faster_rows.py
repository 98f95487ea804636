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


class Layer:
    """Hold arrays of a layer and the launches of a trial by what they are for, norms aside."""

    def __init__(self, trial: Trial) -> None:
        sizes, shape = sizes_of(SMALL), SMALL
        self.arrays = {name: aligned(np.zeros(size, np.uint8)) for name, size in sizes.items()}
        for name, array in contents(shape).items():
            self.arrays[name][:] = array.view(np.uint8)
        queries, inner = normal(1, shape.queries, seed=1), normal(EXPERTS, shape.inner, seed=2)
        self.arrays["packed_queries"][:] = plain.quantised(queries).ravel()
        self.arrays["packed_inner"][:] = plain.quantised(inner).ravel()
        weights = {part: aligned(weights_of(shape, part)) for part in shape.parts}
        blob = aligned(np.concatenate([weights[part] for part in ("gate", "up", "down")]))
        blobs = aligned(np.full(EXPERTS, blob.ctypes.data))
        of = {part: int(array.ctypes.data) for part, array in weights.items()}
        of["blobs"] = int(blobs.ctypes.data)
        at = {name: int(array.ctypes.data) for name, array in self.arrays.items()}
        self._written = [array for name, array in self.arrays.items() if name not in READ]
        self._read = [*(self.arrays[name] for name in READ), *weights.values(), blob, blobs]
        launches = chain_of(shape, trial._replace(norms_last=False), at, [of])
        self._launches = {one.label.rpartition(".")[2]: one for one in launches}

    def run(self, *labels: str) -> None:
        """Run launches one after the other, which overlap as on a card."""
        memory = gpu_simulator.Memory(self._written, self._read)
        for label in labels:
            simulate(of_few_outputs(self._launches[label]), 1, memory)


def results(trial: Trial) -> dict[str, NDArray[np.float32]]:
    """Run what trials are for, behind the norm of the row; return what came to be."""
    layer = Layer(trial)
    for label in ("norm", *TRIED):  # what is left out between them would be in front
        layer.run(label)
    return {name: layer.arrays[name].view(np.float32) for name in RESULTS}


@pytest.fixture(scope="module")
def ours() -> dict[str, NDArray[np.float32]]:
    return results(trials(SMALL)[0])


@pytest.mark.parametrize("trial", trials(SMALL)[1:], ids=lambda one: one.name)
def test_a_trial_has_the_bits_of_our_kernels(
    trial: Trial, ours: dict[str, NDArray[np.float32]]
) -> None:
    found = results(trial)
    if trial.attn_output is not None and not trial.attn_output.reads:
        assert np.all(np.isfinite(found["x"]))
        return
    if trial.attn_output is not None and not trial.attn_output.has_our_bits:
        np.testing.assert_allclose(found["x"], ours["x"], rtol=1e-3, atol=1e-3)
        return
    for name in RESULTS:
        assert same_bits(found[name], ours[name]), name


def test_a_residual_loaded_before_the_wait_was_written_two_launches_ago_or_earlier() -> None:
    together = next(one for one in trials(SMALL) if one.name == "together")
    Layer(together).run("down", "qkv", "quantise", "attn_output")
    with pytest.raises(gpu_simulator.KernelFault, match="launch in front"):
        Layer(together).run("down", "attn_output")


def test_kernels_that_are_tried_fit_their_registers() -> None:
    shape = Shape()
    of, at = dict.fromkeys((*shape.parts, "blobs"), 0), dict.fromkeys(sizes_of(shape), 0)
    launches = [one for trial in trials(shape)[-1:] for one in chain_of(shape, trial, at, [of])]
    kernels = {one.kernel.name: one for one in launches if one.kernel.name.startswith("try_")}
    assert len(kernels) == len(("normed", "row", "down"))
    for one in kernels.values():
        assert cubin_of(one.kernel, one.kinds, "sm_90").spill_bytes == 0, one.kernel.name
