"""The faults that tools/mutate.py makes: each has its place, and each is noticed."""

from __future__ import annotations

import pytest
from mutate import FAULTS, ROOT, Fault, broken, noticed


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_has_one_place_and_leaves_valid_python(fault: Fault) -> None:
    path = ROOT / fault.file
    compile(broken(fault, path.read_text(encoding="utf-8")), fault.file, "exec")
    assert all((ROOT / test).exists() for test in fault.tests)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_noticed(fault: Fault) -> None:
    assert noticed(fault)
