"""OpenVINO GenAI in an environment of its own, and the model in its format.

optimum-intel, which converts models, asks for torchvision, which would bring another torch and
which a language model does not need: so it is installed without its dependencies, after the ones
that it does need. torch comes by the version that this project is pinned to, so that whichever
build of it pip is told of (find-links, an index of one's own) is taken.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import model as demo_model  # scripts/model.py: fetches the model that everything here uses
from filelock import FileLock

from benchmarks.peers import CACHE, ROOT, PeerError, run
from shark_llm.checkpoint.open import open_checkpoint

PACKAGES = (
    "openvino-genai==2026.4.1.0",
    "transformers==5.5.4",
    "huggingface-hub==1.21.0",
    "nncf==3.4.0",
    "requests==2.34.2",
)
CONVERTER = ("optimum==2.3.0", "optimum-intel==2.2.0")
WEIGHT_FORMATS = {"bf16": "fp16", "f16": "fp16", "f32": "fp32", "int8": "int8"}
"""How the weights are kept: optimum-intel writes no bf16, and f16 is as wide; int8 is, as ours, of
the matrices alone, with a scale for each output channel."""
FORMS = {
    "bf16": (("bf16", "bf16"), ("f32", "f32")),
    "f16": (("f16", "f16"), ("f32", "f32")),
    "f32": (("f32", "f32"),),
    "int8": (("bf16", "bf16"), ("f32", "f32")),
}
"""What it may compute in, and keep keys and values in, which by default are 8 bits wide. A CPU
without instructions for bf16 takes f32 alone."""
ENVIRONMENT = CACHE / "openvino"
PYTHON = ENVIRONMENT / "bin" / "python"


def python() -> Path:
    """The Python that has openvino_genai; the first call makes its environment (minutes)."""
    torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None, "constraints.txt pins torch"
    packages = [torch[0], *PACKAGES]
    made_from = "\n".join([*packages, *CONVERTER])
    stamp = ENVIRONMENT / "stamp"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "openvino.lock"):
        if not (stamp.exists() and stamp.read_text() == made_from):
            print(f"bench: installing {PACKAGES[0]} (minutes)", flush=True)
            shutil.rmtree(ENVIRONMENT, ignore_errors=True)
            log = CACHE / "openvino.log"
            log.write_bytes(b"")
            run([sys.executable, "-m", "venv", str(ENVIRONMENT)], log)
            install = [str(PYTHON), "-m", "pip", "install", "--no-input"]
            run([*install, *packages], log)
            run([*install, "--no-deps", *CONVERTER], log)
            stamp.write_text(made_from)
    return PYTHON


def model(dtype: str) -> Path:
    """The model with matrices in `dtype`, converted once from our own export of the checkpoint."""
    path = CACHE / "openvino-models" / dtype
    converter = python().with_name("optimum-cli")
    with FileLock(CACHE / "openvino.lock"):
        if not path.exists():
            print(f"bench: converting the model for OpenVINO, {dtype}", flush=True)
            checkpoint, staged = path.with_suffix(".checkpoint"), path.with_suffix(".part")
            shutil.rmtree(staged, ignore_errors=True)
            _export(checkpoint, dtype)
            command = [str(converter), "export", "openvino", "--model", str(checkpoint)]
            command += ["--task", "text-generation-with-past"]
            command += ["--weight-format", WEIGHT_FORMATS[dtype], str(staged)]
            offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
            run(command, CACHE / "openvino.log", **offline)
            if not (staged / "openvino_model.xml").exists():
                raise PeerError(f"optimum-cli wrote no model to {staged.relative_to(ROOT)}")
            shutil.rmtree(checkpoint)
            staged.rename(path)
    return path


def _export(directory: Path, dtype: str) -> None:
    import torch  # seconds to import, and most runs find the model converted

    from shark_llm.checkpoint.export_hf import export_hf

    demo_model.fetch()
    dtypes = {"f16": torch.float16, "f32": torch.float32}
    wanted = dtypes.get(dtype, torch.bfloat16)
    export_hf(open_checkpoint(demo_model.MODEL), directory, dtype=wanted)
