"""Which reader a path needs, decided by what is there."""

from __future__ import annotations

from pathlib import Path

from shark_llm.checkpoint.gguf import GgufCheckpoint
from shark_llm.checkpoint.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsCheckpoint
from shark_llm.checkpoint.source import Checkpoint
from shark_llm.errors import CheckpointError


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory, a .gguf file, or a directory with one .gguf file in it.

    An index, where there is one, decides which weight files count. Raises CheckpointError when
    there is nothing that can be read, and says what was found instead.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return GgufCheckpoint(path)
        remedies = {".safetensors": "name its directory", ".json": "name a directory with weights"}
        remedy = remedies.get(path.suffix, "name a .gguf file")
        raise CheckpointError(f"{path}: is a single file, and no .gguf: {remedy}")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or directory")
    if (path / INDEX_NAME).is_file() or (path / SINGLE_NAME).is_file():
        return SafetensorsCheckpoint(path)
    files = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    gguf = [name for name in files if name.endswith(".gguf")]
    if len(gguf) == 1:
        return GgufCheckpoint(path / gguf[0])
    if gguf:
        raise CheckpointError(f"{path}: holds several models: {', '.join(gguf)}; name one of them")
    raise CheckpointError(f"{path}: {_why_nothing(files)}")


def _why_nothing(files: list[str]) -> str:
    safetensors = [name for name in files if name.endswith(".safetensors")]
    consolidated = [name for name in safetensors if name.startswith("consolidated")]
    pickled = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    wanted = f"{SINGLE_NAME} or {INDEX_NAME}"
    if consolidated:
        return (
            f"has only {', '.join(consolidated)}, in the original layout: the Hugging Face layout"
            f" is needed ({wanted}, with other names and another order of rows)"
        )
    if safetensors:
        return f"has {', '.join(safetensors)}, but neither {wanted}: complete the download"
    if pickled:
        return (
            f"has only pickled weights ({', '.join(pickled)}), which may run code when read:"
            f" convert them to safetensors ({wanted})"
        )
    return f"holds no weights: expected {wanted}, or a .gguf file"
