"""What the names of a repository's files tell: whether there is anything that we read."""

from __future__ import annotations

from collections.abc import Collection

from shark_llm.checkpoint.safetensors import INDEX_NAME, SINGLE_NAME
from shark_llm.errors import CheckpointError


def refuse_unreadable(repo_id: str, listing: Collection[str]) -> None:
    """Refuse a repository from the names of its files alone. Raises CheckpointError."""
    if "config.json" in listing and (INDEX_NAME in listing or SINGLE_NAME in listing):
        return
    wanted = f"config.json and {SINGLE_NAME} or {INDEX_NAME}"
    consolidated = [name for name in listing if name.startswith("consolidated")]
    pickled = [name for name in listing if name.endswith((".bin", ".pt", ".pth"))]
    if any(name.endswith(".gguf") for name in listing):
        raise CheckpointError(f"{repo_id}: {gguf_files(repo_id, listing)}")
    if "adapter_config.json" in listing:
        why = "holds an adapter, no whole model: merge it into its base model"
    elif consolidated:
        why = f"has only {', '.join(consolidated)}, in the original layout"
    elif pickled:
        why = f"has only pickled weights ({', '.join(pickled)}), which may run code when read"
    elif "config.json" not in listing:
        why = "has no config.json"
    else:
        why = "has no weights"
    raise CheckpointError(f"{repo_id}: {why}; the Hugging Face layout is needed: {wanted}")


def gguf_files(repo_id: str, listing: Collection[str]) -> str:
    """What can be named of a repository with GGUF files, for the end of a message."""
    files = [name for name in listing if name.endswith(".gguf")]
    if not files:
        return "the repository has no .gguf file"
    return f"it holds GGUF files, name one of them: {', '.join(f'{repo_id}:{f}' for f in files)}"
