"""The facts that stand beside every figure: what machine this is, and what ran on it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

from benchmarks.peers import ROOT
from benchmarks.results import Machine
from shark_llm.artifacts.cpu import host_cpu_features
from shark_llm.errors import UsageError
from shark_llm.runtime.cores import usable_cores

_CPU = Path("/sys/devices/system/cpu")


def facts() -> Machine:
    """This machine, now."""
    info = _read(Path("/proc/cpuinfo"))
    memory = re.search(r"^MemTotal:\s*(\d+)", _read(Path("/proc/meminfo")), re.MULTILINE)
    return Machine(
        cpu=_cpuinfo(info, "model name") or platform.processor() or "unknown",
        family=f"family {_cpuinfo(info, 'cpu family')}, model {_cpuinfo(info, 'model')}",
        cores=len(usable_cores()),
        threads=os.cpu_count() or 1,
        virtual="hypervisor" in (_cpuinfo(info, "flags") or "").split(),
        caches=_caches(),
        features=sorted(host_cpu_features()),
        memory_gib=round(int(memory[1]) / 2**20, 1) if memory else 0.0,
        kernel=f"{platform.system()} {platform.release().split('-')[0]}",
        load=[round(value, 2) for value in os.getloadavg()],
    )


def choose_cpus(count: int) -> list[int]:
    """`count` CPUs on cores of their own. Raises UsageError when there are fewer."""
    cores = [core[0] for core in usable_cores()]  # hyperthreads left out
    if count > len(cores):
        raise UsageError(f"--cores is {count}; this machine lets us run on {len(cores)}")
    return cores[:count]


def versions() -> dict[str, str]:
    """Of what takes part on our side; peers add their own."""
    names = ("shark-llm", "iree-base-runtime", "iree-base-compiler", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {**found, "python": platform.python_version()}


def commit() -> str:
    """The commit that runs, with "+" behind it when the tree has changes."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "scripts")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+" if changed else "")


def now() -> str:
    """UTC, to the minute."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _caches() -> dict[str, str]:
    """{"L1d": "32K", "L2": "512K", "L3": "32768K"}: as the first CPU sees them."""
    found = {}
    for index in sorted((_CPU / "cpu0" / "cache").glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get(_read(index / "type").strip(), "")
        found[f"L{_read(index / 'level').strip()}{kind}"] = _read(index / "size").strip()
    return found


def _cpuinfo(text: str, field: str) -> str | None:
    line = re.search(rf"^{field}\s*:\s*(.*)$", text, re.MULTILINE)
    return line[1].strip() if line else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
