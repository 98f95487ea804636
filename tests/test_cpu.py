"""Cores and memory as a process may use them, read from made-up /proc and /sys trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strata_nb.cpu import (
    available_memory_bytes,
    memory_limit_bytes,
    physical_cores,
    usable_processors,
)

GIB = 1 << 30


class Machine:
    """Write the files that the kernel would show."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.sys = root / "sys"

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")

    def core(self, *processors: int) -> None:
        """Make processors the threads of one core."""
        for processor in processors:
            self.write(
                f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list",
                ",".join(map(str, processors)) + "\n",
            )

    def cores(self) -> int:
        return physical_cores(proc=self.proc, sys=self.sys)

    def processors(self) -> int:
        return usable_processors(proc=self.proc, sys=self.sys)

    def memory(self) -> int:
        return available_memory_bytes(proc=self.proc, sys=self.sys)

    def limit(self) -> int:
        return memory_limit_bytes(proc=self.proc, sys=self.sys)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with four cores of two threads, all of them allowed."""
    machine = Machine(tmp_path)
    for core in range(4):
        machine.core(core, core + 4)
    machine.write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n")
    allow(monkeypatch, *range(8))
    return machine


def allow(monkeypatch: pytest.MonkeyPatch, *processors: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(processors), raising=False)


def test_the_threads_of_a_core_count_once(machine: Machine) -> None:
    assert machine.cores() == 4


@pytest.mark.parametrize(
    ("processors", "cores"), [((0,), 1), ((0, 4), 1), ((0, 2), 2), ((0, 1, 4, 5), 2)]
)
def test_only_processors_within_the_affinity_count(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, processors: tuple[int, ...], cores: int
) -> None:
    allow(monkeypatch, *processors)
    assert machine.cores() == cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("900000 100000", 4),
        ("max 100000", 4),
        ("0 0", 4),
        ("nonsense", 4),
    ],
)
def test_a_cgroup_quota_limits_the_cores_rounded_up(
    machine: Machine, quota: str, cores: int
) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.write("sys/fs/cgroup/a/b/cpu.max", quota + "\n")
    assert machine.cores() == cores


@pytest.mark.parametrize(
    ("quota", "processors"), [("max 100000", 8), ("250000 100000", 2), ("1000 100000", 1)]
)
def test_usable_processors_are_threads_of_cores_within_the_whole_of_a_quota(
    machine: Machine, quota: str, processors: int
) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.write("sys/fs/cgroup/a/cpu.max", quota + "\n")
    assert machine.processors() == processors


def test_the_tightest_quota_up_the_tree_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    machine.write("sys/fs/cgroup/a/cpu.max", "200000 100000\n")
    machine.write("sys/fs/cgroup/cpu.max", "300000 100000\n")
    assert machine.cores() == 2


def test_a_path_of_the_host_that_is_absent_here_leaves_the_root_of_the_container(
    machine: Machine,
) -> None:
    machine.write("proc/self/cgroup", "0::/../../docker/abc\n")
    machine.write("sys/fs/cgroup/cpu.max", "100000 100000\n")
    assert machine.cores() == 1


@pytest.mark.parametrize(("quota", "cores"), [("150000", 2), ("-1", 4)])
def test_a_quota_of_cgroup_version_1_counts_too(machine: Machine, quota: str, cores: int) -> None:
    machine.write("proc/self/cgroup", "3:memory:/m\n2:cpu,cpuacct:/jobs/x\n0::/\n")
    machine.write("sys/fs/cgroup/cpu,cpuacct/jobs/x/cpu.cfs_quota_us", f"{quota}\n")
    machine.write("sys/fs/cgroup/cpu,cpuacct/jobs/x/cpu.cfs_period_us", "100000\n")
    assert machine.cores() == cores


def test_a_machine_that_shows_nothing_counts_each_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, 0, 3, 5)
    assert Machine(tmp_path).cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert Machine(tmp_path).cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert Machine(tmp_path).cores() == 1


def test_available_memory_is_the_kernels_estimate_where_no_cgroup_limits_it(
    machine: Machine,
) -> None:
    assert machine.memory() == 8 * GIB
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.write("sys/fs/cgroup/a/memory.max", "max\n")
    machine.write("sys/fs/cgroup/a/memory.current", f"{5 * GIB}\n")
    assert machine.memory() == 8 * GIB


def test_a_cgroup_limit_leaves_what_is_not_used_yet_and_its_page_cache(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.write("sys/fs/cgroup/a/memory.max", f"{4 * GIB}\n")
    machine.write("sys/fs/cgroup/a/memory.current", f"{3 * GIB}\n")
    assert machine.memory() == GIB
    machine.write("sys/fs/cgroup/a/memory.stat", f"anon 5\ninactive_file {GIB // 2}\n")
    assert machine.memory() == GIB * 3 // 2


def test_a_full_cgroup_leaves_nothing_and_not_less(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.write("sys/fs/cgroup/a/memory.max", f"{GIB}\n")
    machine.write("sys/fs/cgroup/a/memory.current", f"{GIB + 4096}\n")
    assert machine.memory() == 0


def test_a_memory_limit_of_cgroup_version_1_counts_and_its_unlimited_number_does_not(
    machine: Machine,
) -> None:
    machine.write("proc/self/cgroup", "4:memory:/m/n\n0::/\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{2 * GIB}\n")
    assert machine.memory() == 8 * GIB
    machine.write("sys/fs/cgroup/memory/m/n/memory.limit_in_bytes", f"{3 * GIB}\n")
    machine.write("sys/fs/cgroup/memory/m/n/memory.usage_in_bytes", f"{2 * GIB}\n")
    assert machine.memory() == GIB


def test_the_memory_limit_is_the_machines_or_the_tightest_of_its_cgroups(machine: Machine) -> None:
    assert machine.limit() == 16 * GIB
    machine.write("proc/self/cgroup", "0::/a/b\n4:memory:/m\n")
    machine.write("sys/fs/cgroup/a/b/memory.max", "max\n")
    machine.write("sys/fs/cgroup/memory/m/memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.limit() == 16 * GIB
    machine.write("sys/fs/cgroup/a/memory.max", f"{5 * GIB}\n")
    machine.write("sys/fs/cgroup/a/memory.current", f"{4 * GIB}\n")
    assert machine.limit() == 5 * GIB
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{3 * GIB}\n")
    assert machine.limit() == 3 * GIB


def test_without_proc_the_whole_memory_is_the_estimate(tmp_path: Path) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert Machine(tmp_path).memory() == whole
    assert Machine(tmp_path).limit() == whole


def test_this_machine_has_a_core_and_some_memory() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
    assert 1 << 20 < available_memory_bytes() <= memory_limit_bytes()
