"""What of the machine is this process's own: memory and cores as the kernel and the control groups (v1 and v2) grant them, and
the cards that CUDA shows it.

A container sees the whole host in /proc; what it may use stands in its control group and in those above it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

ROOT = Path("/")
ADDRESSES = MappingProxyType({"address": "VmSize", "data": "VmData"})  # of /proc/self/limits: what counts against each


def available_memory(root: Path = ROOT) -> int:
    """Bytes of host memory that can still be taken: of the host without swapping, of every control group around us, and of the
    addresses that may be asked for, used or not (`ulimit -v`, a kernel that promises no more than it has)."""
    memory = _kilobytes(root / "proc/meminfo")
    available = memory.get("MemAvailable", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))  # not Linux
    if _number(root / "proc/sys/vm/overcommit_memory") == 2 and "CommitLimit" in memory:
        available = min(available, max(0, memory["CommitLimit"] - memory.get("Committed_AS", 0)))
    ours = _kilobytes(root / "proc/self/status")
    for words in map(str.split, _lines(root / "proc/self/limits")):
        if len(words) > 3 and words[1] in ADDRESSES and words[3].isdecimal():  # else it is "unlimited"
            available = min(available, max(0, int(words[3]) - ours.get(ADDRESSES[words[1]], 0)))
    for group, is_v2 in _groups("memory", root):
        limit = _number(group / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        used = _number(group / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used + _file_pages(group)))
    return available


def give_memory_back() -> None:
    """What has been freed goes back to the system.

    glibc takes small pieces, and after the first large one has been freed those up to 32 MiB too, from its heaps, and of these
    gives back the end only: what lies below anything that lives stays resident, 1.1 GiB after two loads of a 135M model.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def usable_cpus(root: Path = ROOT) -> list[list[int]]:
    """The logical CPUs of this process's affinity, those of a core together, the cores of a socket after one another."""
    try:
        mine = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        mine = set(range(os.cpu_count() or 1))
    cores: dict[str, list[int]] = {}
    sockets: dict[str, int] = {}
    for i in sorted(mine):
        topology = root / f"sys/devices/system/cpu/cpu{i}/topology"
        siblings = " ".join(_words(topology / "thread_siblings_list")) or str(topology)
        cores.setdefault(siblings, []).append(i)
        sockets[siblings] = _number(topology / "physical_package_id") or 0
    return [cores[core] for core in sorted(cores, key=lambda core: (sockets[core], cores[core]))]


def usable_cores(root: Path = ROOT) -> int:
    """Cores that this process may keep busy, at least one: those of its affinity, or a control group's quota if that is less.

    Two threads of a core count once: they wait for the same memory and the same arithmetic.
    """
    cores = len(usable_cpus(root))
    for group, is_v2 in _groups("cpu", root):
        if is_v2:
            quota, period = (*_words(group / "cpu.max"), "", "")[:2]
        else:
            quota, period = ("".join(_words(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 are no limit
            cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


def cuda_driver() -> ctypes.CDLL | None:
    """The CUDA driver's library, with nothing initialized; None: there is none, and so no card."""
    if not sys.platform.startswith(("linux", "win")):
        return None
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def num_cards() -> int:
    """As CUDA counts them, which looks at CUDA_VISIBLE_DEVICES. No context is made."""
    driver, count = cuda_driver(), ctypes.c_int(0)
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """The directories of our control group and of those around it that have this controller, and whether they are of v2."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        # a hybrid keeps v2 apart; v1 may join controllers in one directory
        mounts = [names, controller] if names else [".", "unified"]
        for mount in dict.fromkeys(root / "sys/fs/cgroup" / name for name in mounts):
            group = mount / path.lstrip("/")
            # a container often sees its group as the mount itself, under a path of the host that is not there
            yield mount, not names
            while group != mount and mount in group.parents:
                yield group, not names
                group = group.parent


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _kilobytes(path: Path) -> dict[str, int]:
    """What lines of `NAME: N kB` say, in bytes."""
    words = (line.replace(":", " ").split() for line in _lines(path))
    return {w[0]: int(w[1]) * 1024 for w in words if len(w) == 3 and w[1].isdecimal() and w[2] == "kB"}


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() else None


def _file_pages(group: Path) -> int:
    """Bytes that count as used but are only copies of files, such as of a checkpoint that was read: given back when needed."""
    words = _words(group / "memory.stat")
    stat = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=False) if value.isdecimal()}
    prefix = "total_" if "total_inactive_file" in stat else ""  # v1 counts the groups below only there
    return stat.get(prefix + "inactive_file", 0) + stat.get(prefix + "active_file", 0)
