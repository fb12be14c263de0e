"""Write a checkpoint, whatever its format, as a Hugging Face safetensors directory."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shark_llm.checkpoint.names import to_hf_name
from shark_llm.checkpoint.safetensors import DTYPES, INDEX_NAME, SINGLE_NAME
from shark_llm.checkpoint.source import Checkpoint, ParameterInfo, iter_row_blocks

_FORMAT_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def export_hf(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Write config, tokenizer and weights into `directory`, which is made if it is not there.

    `dtype` None keeps the dtype of each tensor. Weights stream through in blocks of rows; above
    `max_shard_bytes` they are split into shards with an index. config.json gets the dtype that is
    written and says of tied embeddings what the weights say. Files of these names are overwritten.
    """
    assert dtype is None or dtype in _FORMAT_NAMES, dtype
    directory.mkdir(parents=True, exist_ok=True)
    infos = {
        name: info if dtype is None else dataclasses.replace(info, dtype=dtype)
        for name, info in checkpoint.parameters.items()
    }
    for name, content in checkpoint.aux_files.items():
        (directory / name).write_bytes(content)
    config = json.loads(checkpoint.aux_files["config.json"])
    config.pop("dtype", None)
    config["torch_dtype"] = _dtype_of(infos)
    config["tie_word_embeddings"] = checkpoint.config.tie_word_embeddings
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    shards = _shards(infos, max_shard_bytes)
    if len(shards) == 1:
        _write_file(checkpoint, directory / SINGLE_NAME, infos, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(checkpoint, directory / file_name, infos, names)
        weight_map |= {to_hf_name(name): file_name for name in names}
    total = sum(info.num_bytes for info in infos.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _dtype_of(infos: dict[str, ParameterInfo]) -> str:
    """The dtype of most bytes."""
    sizes: dict[torch.dtype, int] = {}
    for info in infos.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.num_bytes
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def _shards(infos: dict[str, ParameterInfo], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in infos.items():
        if shards[-1] and size + info.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.num_bytes
    return shards


def _write_file(
    checkpoint: Checkpoint, path: Path, infos: dict[str, ParameterInfo], names: Sequence[str]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + infos[name].num_bytes
        header[to_hf_name(name)] = {
            "dtype": _FORMAT_NAMES[infos[name].dtype],
            "shape": list(infos[name].shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the data is aligned for readers that map it
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in names:
            for block in iter_row_blocks(checkpoint, name):
                converted = block.to(infos[name].dtype).contiguous()
                file.write(converted.flatten().view(torch.uint8).numpy().data)
