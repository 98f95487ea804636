"""`strata_nb devices`: on what models can run here."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from strata_nb import cpu
from strata_nb.commands.arguments import Arguments
from strata_nb.commands.terminal import note
from strata_nb.errors import ConfigError, StrataError, UnsupportedDevice
from strata_nb.host import parse_host_devices
from strata_nb.models.description import bytes_text
from strata_nb.options import REFERENCE

if TYPE_CHECKING:
    from strata_nb.driver import CudaDriver


def _host(text: str) -> list[str]:
    # Here, because this loads Numba.
    from strata_nb.kernels.host.capability import PATH

    devices = parse_host_devices(text)
    lines = []
    for number, device in enumerate(devices):
        memory = (
            f"{bytes_text(device.budget_bytes)} of memory, "
            f"{bytes_text(cpu.available_memory_bytes())} available, experts read in place"
            if text == "host"
            else f"device {number}: {bytes_text(device.budget_bytes)} for weights, K/V and expert "
            f"slots, chunks of {bytes_text(device.minimum_bytes)} or more"
        )
        lines.append(f"{text:10} {memory}")
    lines.append(
        f"{'':10} {cpu.processor_name()}, {cpu.physical_cores()} cores, {PATH.value} instructions"
    )
    return lines


def cards(open_driver: Callable[[], CudaDriver], text: str | None = None) -> list[str]:
    """Return a line for each NVIDIA card, or one that says why there is none.

    text   None, or what was asked for: "cuda" or "cuda:1"; then that there is no such card raises
           UnsupportedDevice, and anything else ConfigError
    """
    match = re.fullmatch(r"cuda(?::(\d+))?", text or "cuda", re.ASCII)
    if match is None:
        raise ConfigError(f"--device {text}: not known", hint="cuda, cuda:0")
    try:
        driver = open_driver()
    except UnsupportedDevice as error:
        if text is None:
            return [f"{'cuda':10} none: {error.message}"]
        raise UnsupportedDevice(f"--device {text}: {error.message}", hint=error.hint) from error
    from strata_nb.driver import no_such_card

    with closing(driver):
        found = range(driver.device_count)
        wanted = found if match[1] is None else [int(match[1])]
        if any(card not in found for card in wanted):
            missing = no_such_card(wanted[0], len(found))
            raise UnsupportedDevice(f"--device {text}: {missing.message}", hint=missing.hint)
        return [f"{f'cuda:{card}':10} {_card(driver, card)}" for card in wanted]


def _card(driver: CudaDriver, card: int) -> str:
    """Return what a card is, or why it cannot be used: the others may be usable all the same."""
    from strata_nb.cuda_table import version_text
    from strata_nb.driver import OUTSIDE_BYTES, RESERVE_BYTES

    try:
        facts, (free, total) = driver.card_facts(card), driver.mem_info(card)
    except StrataError as error:
        return f"cannot be used: {error.message}"
    major, minor = facts.capability
    room = max(0, free - OUTSIDE_BYTES - RESERVE_BYTES)
    return (
        f"{facts.name}, {bytes_text(free)} of {bytes_text(total)} free, of which "
        f"{bytes_text(room)} for weights, K/V and expert slots, compute capability "
        f"{major}.{minor}, driver for CUDA {version_text(driver.version)}"
    )


def _chosen() -> str:
    """Return the device that auto is, and say why."""
    from strata_nb.backend import choose_backend  # loads Numba

    backend, reason = choose_backend(threads=1)
    with closing(backend):
        note(f"device {backend.name}: {reason}")
        return backend.name


def run(arguments: Arguments) -> int:
    """Run the command; returns 0."""
    from strata_nb.driver import CudaDriver

    asked = arguments.text("--device")
    if asked == "auto":
        asked = _chosen()
    if asked is not None and asked.split(":")[0] not in ("host", "cuda", REFERENCE):
        raise ConfigError(
            f"--device {asked}: not known", hint="auto, host, host:1x512MiB, cuda, " + REFERENCE
        )
    if asked is None or asked.startswith("host"):
        print("\n".join(_host(asked or "host")))
    if asked is None:
        print(f"{'host:NxSIZE':10} N small devices made of the host's memory: host:1x512MiB")
    if asked is None or asked.startswith("cuda"):
        print("\n".join(cards(CudaDriver, asked)))
    if asked is None or asked == REFERENCE:
        print(f"{REFERENCE:10} the float32 judge, {cpu.physical_cores()} threads of numpy's BLAS")
    return 0
