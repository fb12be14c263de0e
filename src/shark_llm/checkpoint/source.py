"""What every checkpoint reader offers, whatever the file format.

Parameter names are ours, which are GGUF's: `token_embd.weight`, `blk.{i}.attn_q.weight`,
`output_norm.weight` ... The name map from Hugging Face's stands in `names.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from shark_llm.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """A parameter as it would be read: whole shape, and the dtype `read` returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint(Protocol):
    """A Llama on disk, opened: config checked, weight map total, no weight read yet."""

    config: ModelConfig
    parameters: Mapping[str, ParameterInfo]
    """Every parameter of the model by our name; without `output.weight` when embeddings are tied."""
    aux_files: Mapping[str, bytes]
    """config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
    chat_template.jinja: those that the checkpoint has (for GGUF: rebuilt from its metadata)."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start .. stop - 1 of dimension 0, in fresh memory (never a mapping of the whole file)."""
        ...

    def digest(self) -> str:
        """sha256 over names, shapes, dtypes and bytes of all weight files: 64 hex digits."""
        ...
