"""An environment for each client, with exactly one version of it, made once in .cache/clients.

torch comes by the version that this project is pinned to, so that whichever build of it pip is told
of (find-links, an index of one's own) is taken.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "clients"
PACKAGES: Mapping[str, Sequence[str]] = {
    "openai": ("openai==3.57.0",),
    "llama-benchy": ("llama-benchy==0.4.0", "torch"),
    "guidellm": ("guidellm==0.8.1", "torch"),
    "aiperf": ("aiperf==0.13.0",),
    "lm_eval": ("lm_eval[api,hf]==0.4.13", "torch"),
}


class InstallError(Exception):
    """A client does not install here; the message ends with pip's own."""


def python_of(client: str) -> Path:
    """The interpreter that has the client; the first call installs it (minutes)."""
    place = CACHE / client
    python, stamp = place / "bin" / "python", place / "stamp"
    wanted = [_pinned_torch() if p == "torch" else p for p in PACKAGES[client]]
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / f"{client}.lock"):
        if stamp.exists() and stamp.read_text() == "\n".join(wanted):
            return python
        print(f"clients: installing {client} into .cache/clients (minutes)", flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(place)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--no-input", *wanted])
        stamp.write_text("\n".join(wanted))
    return python


def _pinned_torch() -> str:
    found = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None, "constraints.txt pins torch"
    return found[0]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        raise InstallError(" / ".join(lines[-3:])[:500] or f"exit code {done.returncode}")
