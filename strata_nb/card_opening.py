"""Open graphics cards: the one that is named, or the first that can be used.

A card can be used where the driver starts, the card has what is needed, and the installed toolkit
makes code for it. All of that is asked before anything is planned or loaded. Numba's compiler for
cards takes a second to load, so nothing of it is imported before a driver was found.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from strata_nb.driver import CudaDriver, no_such_card
from strata_nb.errors import DriverError, UnsupportedDevice
from strata_nb.tracing import Recorder

if TYPE_CHECKING:
    from strata_nb.card_backend import CardBackend

Record = Callable[[str], Recorder | None]
"""Return what writes down what a device's driver is asked; None where nobody does."""

_TOOLKIT_HINT = "install what compiles them: pip install 'strata-nb[cuda]'"
_PROBE = ".version 6.3\n.target sm_75\n.address_size 64\n.visible .entry probe() { ret; }\n"


def open_card(text: str, threads: int, record: Record) -> CardBackend:
    """Return the backend of the card that `text` names: "cuda" (the first) or "cuda:1".

    UnsupportedDevice where there is no driver, no such card, or nothing that compiles kernels for
    it; DriverError where the card is there and fails.
    """
    number = int(text.partition(":")[2] or 0)
    try:
        driver = CudaDriver()
        try:
            if number >= driver.device_count:
                raise no_such_card(number, driver.device_count)
            return _backend(text, driver, number, threads, record)
        except BaseException:
            driver.close()
            raise
    except UnsupportedDevice as error:
        raise UnsupportedDevice(f"--device {text}: {error.message}", hint=error.hint) from error


def open_first_card(threads: int, record: Record) -> tuple[CardBackend | None, str]:
    """Return the backend of the first card that can be used, None for none, and why."""
    try:
        with closing(CudaDriver()) as driver:
            cards = range(driver.device_count)
        from strata_nb.kernels.gpu.compile import toolkit_versions

        toolkit_versions()  # once, for all cards
    except UnsupportedDevice as error:
        return None, error.message
    passed: list[str] = []
    for number in cards:
        driver = CudaDriver()
        try:
            name = driver.device_facts(number).name
            backend = _backend(f"cuda:{number}", driver, number, threads, record)
        except (UnsupportedDevice, DriverError) as error:
            driver.close()
            passed.append(f"cuda:{number}: {error.message}")
        except BaseException:
            driver.close()
            raise
        else:
            return backend, "; ".join([name, *passed])
    return None, "; ".join(passed)


def _backend(
    text: str, driver: CudaDriver, number: int, threads: int, record: Record
) -> CardBackend:
    """Return the backend of an open driver's card, which closes the driver."""
    from strata_nb.card_backend import CardBackend
    from strata_nb.kernels.gpu.compile import link
    from strata_nb.kernels.gpu.cubins import Cubins
    from strata_nb.kernels.gpu.intrinsics.warpgroups import WITH_WARPGROUPS

    major, minor = driver.card_facts(number).capability
    compiler = Cubins(f"sm_{major}{minor}")
    try:
        link(_PROBE, compiler.target)
    except RuntimeError as error:  # a library of the toolkit is not there
        raise UnsupportedDevice(
            f"kernels for NVIDIA cards cannot be linked: {' '.join(str(error).split())}",
            hint=_TOOLKIT_HINT,
        ) from error
    return CardBackend(
        text,
        driver,
        number,
        compiler,
        threads,
        record(text),
        has_warpgroups=(major, minor) == WITH_WARPGROUPS,
    )
