"""What an open model says of itself, for programs: figures as they are at one moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from strata_nb.models.description import bytes_text


class DeviceReport(NamedTuple):
    """Describe one device.

    name              for people
    free_bytes        of its memory, within the limit
    total_bytes       of its memory: the limit, or all
    device_bytes      all of its memory; these three are None where it is the machine's
    reserve_bytes     that are to stay free for others
    slots, resident   expert slots, and how many hold an expert
    kv_cells          of K/V that there is memory for
    bytes_by_owner    of the device's memory; what the driver, its modules and graphs and other
                      programs have is "outside". With what is free they are all of it
    """

    name: str
    free_bytes: int | None
    total_bytes: int | None
    device_bytes: int | None
    reserve_bytes: int
    slots: int
    resident: int
    kv_cells: int
    bytes_by_owner: dict[str, int]

    @property
    def limit_text(self) -> str:
        """Say in words that the device counts as a smaller one; empty where it does not."""
        if self.total_bytes is None or self.device_bytes is None:
            return ""
        if self.total_bytes == self.device_bytes:
            return ""
        return f"limited to {bytes_text(self.total_bytes)} of {bytes_text(self.device_bytes)}"


@dataclass(frozen=True, slots=True)
class Report:
    """Describe where a model is and how its experts were found.

    devices           each with its own figures; none for the judge
    hits, misses      choices of experts that found a slot, and others; without slots all are misses
    inserted, inserted_bytes   experts that came to slots since the start, and their bytes
    missed_bytes      of the experts that misses read
    link_bytes        that devices took from host memory for experts: by misses, and by copies
    filled            missed experts that a card brought to slots itself, on their way
    streamed, streamed_bytes   missed experts that were copied for prompt batches, and their bytes
    cpu_experts, cpu_bytes   missed experts that the CPU computed instead, and their bytes
    cpu_wait_s        that the card waited for it
    """

    devices: tuple[DeviceReport, ...] = ()
    hits: int = 0
    misses: int = 0
    inserted: int = 0
    inserted_bytes: int = 0
    missed_bytes: int = 0
    link_bytes: int = 0
    filled: int = 0
    streamed: int = 0
    streamed_bytes: int = 0
    cpu_experts: int = 0
    cpu_bytes: int = 0
    cpu_wait_s: float = 0.0

    @property
    def slots(self) -> int:
        """Expert slots of all devices."""
        return sum(device.slots for device in self.devices)

    @property
    def resident(self) -> int:
        """How many slots hold an expert."""
        return sum(device.resident for device in self.devices)

    @property
    def kv_cells(self) -> int:
        """Cells of K/V that there is memory for."""
        return sum(device.kv_cells for device in self.devices)

    @property
    def hit_rate(self) -> float | None:
        """Share of the choices that found a slot; None before the first one, and without slots."""
        choices = self.hits + self.misses
        return self.hits / choices if choices and self.slots else None

    @property
    def bytes_by_owner(self) -> dict[str, int]:
        """Who has how much of the devices' memory."""
        owners: dict[str, int] = {}
        for device in self.devices:
            for owner, size in device.bytes_by_owner.items():
                owners[owner] = owners.get(owner, 0) + size
        return owners

    def figures(self) -> dict[str, object]:
        """Return all of it by name, what is true of all devices together among it."""
        return {
            **asdict(self),
            "devices": [device._asdict() for device in self.devices],
            "slots": self.slots,
            "resident": self.resident,
            "hit_rate": self.hit_rate,
            "kv_cells": self.kv_cells,
            "bytes_by_owner": self.bytes_by_owner,
        }


@dataclass(frozen=True, slots=True)
class VramReport:
    """Answer a request to leave memory free; MiB are whole, rounded down.

    reserve_mib            that is to stay free, and vram_free_mib that is
    expert_slots           that there are now, expert_cache_mib what they take
    expert_slots_full      that there can be when nobody else needs memory, likewise
    prompt_chunk           rows of a prompt batch
    """

    reserve_mib: int
    expert_slots: int
    expert_slots_full: int
    expert_cache_mib: int
    expert_cache_full_mib: int
    vram_free_mib: int
    prompt_chunk: int
