"""`strata_nb devices`: on what models can run here."""

from __future__ import annotations

from strata_nb import cpu
from strata_nb.commands.arguments import Arguments
from strata_nb.errors import ConfigError
from strata_nb.host import parse_host_devices
from strata_nb.models.description import bytes_text
from strata_nb.options import REFERENCE


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


def run(arguments: Arguments) -> int:
    """Run the command; returns 0."""
    asked = arguments.text("--device")
    if asked == "auto":
        asked = "host"
    if asked is not None and asked.split(":")[0] not in ("host", REFERENCE):
        raise ConfigError(
            f"--device {asked}: not known", hint="auto, host, host:1x512MiB, " + REFERENCE
        )
    if asked is None or asked.startswith("host"):
        print("\n".join(_host(asked or "host")))
    if asked is None:
        print(f"{'host:NxSIZE':10} N small devices made of the host's memory: host:1x512MiB")
    if asked is None or asked == REFERENCE:
        print(f"{REFERENCE:10} the float32 judge, {cpu.physical_cores()} threads of numpy's BLAS")
    return 0
