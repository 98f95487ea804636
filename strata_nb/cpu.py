"""Count what this process may use of the machine: physical cores and memory.

Neither number is the machine's own. A container narrows both: affinity limits the cores, a cgroup
quota their time, a cgroup limit the memory. Two threads on one core share its multipliers, so for a
matrix product a core counts once. Where the kernel shows nothing (not Linux), the answers are those
of the standard library.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")


def physical_cores(*, proc: Path = PROC, sys: Path = SYS) -> int:
    """Return how many physical cores this process may keep busy, at least 1.

    A quota of 2.5 processors counts as 3 cores, for two would leave time unused. `proc` and `sys`
    are the roots of those file systems.
    """
    allowed = _allowed_processors()
    cores = {_core(sys, processor) for processor in allowed}
    return max(1, min([len(cores), *(math.ceil(quota) for quota in _quotas(proc, sys))]))


def usable_processors(*, proc: Path = PROC, sys: Path = SYS) -> int:
    """Return how many threads of this process can run at every moment, at least 1.

    Two threads on one core count as two. A quota of 2.5 processors counts as 2: who uses more is
    stopped for a while.
    """
    quotas = (int(quota) for quota in _quotas(proc, sys))
    return max(1, min([len(_allowed_processors()), *quotas]))


def processor_name(*, proc: Path = PROC) -> str:
    """Return the name of the processor for people."""
    for line in _read(proc / "cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def available_memory_bytes(*, proc: Path = PROC, sys: Path = SYS) -> int:
    """Return how much memory this process can still take without swapping, 0 or more.

    That is the kernel's estimate (MemAvailable; without one, the whole memory), or less where a
    cgroup leaves less. Page cache that the cgroup holds but can give back (inactive_file) counts as
    free, for reading a model file fills it.
    """
    return max(0, min([_machine_memory(proc, "MemAvailable:"), *_memory_rooms(proc, sys)]))


def memory_limit_bytes(*, proc: Path = PROC, sys: Path = SYS) -> int:
    """Return how much memory this process can have at most, whatever is in use now.

    That is the machine's, or less where a cgroup has a limit.
    """
    return min([_machine_memory(proc, "MemTotal:"), *_memory_limits(proc, sys)])


def _allowed_processors() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _core(sys: Path, processor: int) -> str:
    """Return what names the core of a processor: the list of its threads, or else itself."""
    topology = sys / f"devices/system/cpu/cpu{processor}/topology"
    return _read(topology / "thread_siblings_list").strip() or f"processor {processor}"


def _quotas(proc: Path, sys: Path) -> Iterator[float]:
    """Yield each limit, in processors, that a cgroup of this process sets."""
    for group in _cgroups(proc, sys, "cpu"):
        match _read(group / "cpu.max").split():
            case [quota, period] if quota.isdigit() and period.isdigit() and int(period) > 0:
                yield int(quota) / int(period)
        quota_us, period_us = (
            _number(group / "cpu.cfs_quota_us"),
            _number(group / "cpu.cfs_period_us"),
        )
        if quota_us is not None and quota_us > 0 and period_us:  # version 1; -1 is no limit
            yield quota_us / period_us


def _machine_memory(proc: Path, key: str) -> int:
    for line in _read(proc / "meminfo").splitlines():
        match line.split():
            case [name, size, "kB"] if name == key:
                return int(size) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_rooms(proc: Path, sys: Path) -> Iterator[int]:
    """Yield what each cgroup of this process with a limit leaves, in bytes."""
    for group in _cgroups(proc, sys, "memory"):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _number(group / limit_file), _number(group / usage_file)
            if limit is not None and usage is not None:
                yield limit - usage + _reclaimable(group)


def _memory_limits(proc: Path, sys: Path) -> Iterator[int]:
    """Yield the limit of each cgroup of this process that has one, in bytes."""
    for group in _cgroups(proc, sys, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(group / name)
            if limit is not None:
                yield limit


def _reclaimable(group: Path) -> int:
    for line in _read(group / "memory.stat").splitlines():
        match line.split():
            case ["inactive_file" | "total_inactive_file", size] if size.isdigit():
                return int(size)
    return 0


def _cgroups(proc: Path, sys: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of all above it, for one controller.

    /proc/self/cgroup has lines `number:controllers:path`; version 2 leaves the controllers empty,
    version 1 mounts each set of them by its own name. Inside a container the path may be the host's
    and absent here: then the walk up ends at the root, where the container's own limits are.
    """
    mount = sys / "fs/cgroup"
    for line in _read(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            root = mount
        elif controller in controllers.split(","):
            root = mount / controllers
        else:
            continue
        group = root / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _number(path: Path) -> int | None:
    """Return the number that a file holds; None where it is absent or says something else."""
    text = _read(path).strip()
    return int(text) if text.removeprefix("-").isdigit() else None


def _read(path: Path) -> str:
    """Return a file's text, empty where there is none: every such file may be missing."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
