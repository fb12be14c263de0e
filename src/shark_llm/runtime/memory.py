"""How much memory of this machine the process may still take.

The machine's own account counts the page cache as free, since it gives way: right after a bundle
was written or read, nearly all memory is page cache. A container's limit counts too, on every level
of its control groups; the kernel ends a process that passes it, without a word.

Sources: proc_meminfo(5), cgroups(7), the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def available_bytes(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken before the machine or a control group runs out of memory."""
    return max(0, min([_machine(proc), *_control_groups(proc, cgroups)]))


def _machine(proc: Path) -> int:
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _read(proc / "meminfo"), re.MULTILINE)
    if found is not None:
        return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux


def _control_groups(proc: Path, cgroups: Path) -> list[int]:
    """What each limited group that the process is in has left."""
    left = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's, of which only the top is mounted here.
        group = top / path.lstrip("/")
        left += [_left(level, *names) for level in (group, *group.parents) if _is_in(level, top)]
    return [value for value in left if value is not None]


def _is_in(level: Path, top: Path) -> bool:
    return level == top or top in level.parents


def _left(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """Limit minus use, where page cache that nobody needs now is no use. None: no limit."""
    most, used = _read(group / limit).strip(), _read(group / usage).strip()
    if not most.isdecimal() or not used.isdecimal():  # "max", or there is no such group here
        return None
    found = re.search(rf"^{cache} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
    return int(most) - int(used) + (0 if found is None else int(found[1]))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
