"""Options that a device cannot do as asked: each is refused with what to do instead."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from strata_nb.errors import ConfigError
from strata_nb.models.description import bytes_text
from strata_nb.options import REFERENCE, Options

if TYPE_CHECKING:
    from strata_nb.backend import Backend


def refuse_on_judge(options: Options) -> None:
    """Raise ConfigError for what the reference device has not."""
    if options.trace is not None:
        raise not_traced(options.trace, REFERENCE)
    for value, flag in (
        (options.profile_path(), "--expert-profile"),
        (options.expert_profile_save, "--expert-profile-save"),
        (options.routing_trace, "--routing-trace"),
        (None if options.expert_cache == "auto" else options.expert_cache, "--expert-cache"),
        (None if options.adapt == "insert" else options.adapt, "--adapt"),
        (options.vram_reserve_mib, "--vram-reserve-mib"),
        (options.vram_limit and bytes_text(options.vram_limit), "--vram-limit"),
        (options.kv_grow_init, "--kv-grow-init"),
        (options.kv_grow_step, "--kv-grow-step"),
        (options.kv_grow or None, "--kv-grow"),
        (options.vram_elastic or None, "--vram-elastic"),
    ):
        if value is not None:
            given = flag if value is True else f"{flag} {value}"
            raise ConfigError(
                f"{given}: the reference device has no memory of its own, no slots, and "
                "counts no experts",
                hint="leave it out, or use another --device",
            )
    if not options.overlap:
        raise _nothing_overlaps(REFERENCE)
    if not options.prefill_borrow:
        raise _nothing_borrows(REFERENCE)
    if (of_pool := _pool_flag(options)) is not None:
        raise _nothing_pools(of_pool, REFERENCE)
    if options.deterministic:
        raise ConfigError(
            "--deterministic: the products of the reference device are numpy's, whose rounding "
            "depends on how a prompt is cut and on the number of threads",
            hint="leave it out, or use another --device",
        )


def refuse_on_backend(options: Options, backend: Backend[Any], device: str) -> None:
    """Raise ConfigError for what programs of the backend of this device cannot do.

    What asks of its memory is looked at in `device_needs`.
    """
    if not options.overlap and not backend.overlaps:
        raise _nothing_overlaps(device)
    if not options.prefill_borrow and not backend.batches_apart:
        raise _nothing_borrows(device)
    if (of_pool := _pool_flag(options)) is not None and not backend.pools:
        raise _nothing_pools(of_pool, device)


def not_traced(path: str | os.PathLike[str], device: str) -> ConfigError:
    return ConfigError(
        f"--trace {os.fspath(path)}: the device {device} has no memory of its own, of which every "
        "chunk could be followed",
        hint="give a device with memory of its own: --device host:1x512MiB",
    )


def _nothing_overlaps(device: str) -> ConfigError:
    return ConfigError(
        f"--no-overlap: the device {device} begins no kernel before another has ended",
        hint="leave it out, or use a card: --device cuda",
    )


def _nothing_borrows(device: str) -> ConfigError:
    return ConfigError(
        f"--no-prefill-borrow: the device {device} borrows nothing for prompts",
        hint="leave it out, or use a card: --device cuda",
    )


def _pool_flag(options: Options) -> str | None:
    """Return what says something of experts that the CPU computes beside a card; None: nothing."""
    if options.pcie_frac != "auto":
        return "--pcie-frac"
    if not options.pin:
        return "--no-pin"
    return None if options.cpu_pool else "--no-cpu-pool"


def _nothing_pools(flag: str, device: str) -> ConfigError:
    return ConfigError(
        f"{flag}: the device {device} shares no experts with the CPU",
        hint="leave it out, or use a card: --device cuda",
    )
