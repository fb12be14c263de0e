"""What every checkpoint reader offers, whatever the file format.

Parameter names are ours, which are GGUF's: `token_embd.weight`, `blk.{i}.attn_q.weight`,
`output_norm.weight` ... The name map from Hugging Face's stands in `names.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shark_llm.artifacts.manifest import ByteProgress
from shark_llm.errors import CheckpointError
from shark_llm.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """A parameter as it would be read: whole shape, and the dtype `read` returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FileExtent:
    """Where a parameter lies in a file, row after row, in the very bytes that `read` returns."""

    path: Path
    offset: int


class Checkpoint(Protocol):
    """A Llama on disk, opened: config checked, weight map total, no weight read yet."""

    config: ModelConfig
    parameters: Mapping[str, ParameterInfo]
    """Every parameter of the model by our name; no `output.weight` when embeddings are tied."""
    aux_files: Mapping[str, bytes]
    """config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
    chat_template.jinja: those that the checkpoint has (for GGUF: rebuilt from its metadata)."""
    notes: tuple[str, ...]
    """What a user should know though it is no error, one line each: a config that lies about the
    dtype, a file passed over. The command line prints them."""

    @property
    def quantized_as(self) -> str | None:
        """The formats of quantized weights, as a user knows them; None: there are none."""
        ...

    @property
    def weight_paths(self) -> tuple[Path, ...]:
        """The files that `digest` depends on."""
        ...

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start .. stop - 1 of dimension 0, in fresh memory (never a mapping of the file)."""
        ...

    def extent(self, name: str) -> FileExtent | None:
        """For whoever reads it into memory of his own; None: `read` computes it."""
        ...

    def digest(self, progress: ByteProgress | None = None) -> str:
        """sha256 over names, shapes, dtypes and bytes of all weight files: 64 hex digits.

        Reads every byte; `progress` is told how many.
        """
        ...


def iter_row_blocks(
    checkpoint: Checkpoint, name: str, max_bytes: int = 64 << 20
) -> Iterator[torch.Tensor]:
    """The whole parameter as blocks of rows, each of at most `max_bytes` or of one row."""
    info = checkpoint.parameters[name]
    rows = max(1, max_bytes * info.shape[0] // info.num_bytes)
    for start in range(0, info.shape[0], rows):
        yield checkpoint.read(name, start, min(start + rows, info.shape[0]))


def read_at(path: Path, offset: int, num_bytes: int) -> torch.Tensor:
    """`num_bytes` bytes of a file from `offset`, as a new uint8 tensor. Raises as `read_into`."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    read_into(buffer.numpy().data, path, offset)
    return buffer


def read_into(view: memoryview, path: Path, offset: int) -> None:
    """Fill `view`, of bytes, with the bytes of a file from `offset` on.

    Positioned reads, and no memory map: pages of a map count as this process's memory for as long
    as it lives, and a file that shrinks under a map kills the process. Raises CheckpointError when
    the file ends early.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                raise _cut_short(path, offset + len(view))
            done += count
    finally:
        os.close(fd)


def _cut_short(path: Path, expected: int) -> CheckpointError:
    """The error for a weight file that ends before byte `expected`, which its header names."""
    return CheckpointError(
        f"{path}: has {path.stat().st_size} bytes, expected {expected}:"
        " it was changed while being read; download it again"
    )
