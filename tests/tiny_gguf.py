"""Tiny GGUF files of a Llama, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize

from shark_llm.checkpoint.names import from_hf_name
from tiny import CHAT_TEMPLATE, MERGES, SPECIAL_TOKENS, tiny_tokenizer

NORMAL, CONTROL = 1, 3


def permute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k from Hugging Face's order (halves of a head) to llama.cpp's (pairs)."""
    rows, *rest = weight.shape
    heads = weight.reshape(num_heads, 2, rows // num_heads // 2, *rest)
    return heads.transpose(1, 2).reshape(rows, *rest)


def write_tiny_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    *,
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    rope_freqs: Sequence[float] | None = None,
    raw: Mapping[str, tuple[np.ndarray[Any, Any], str]] | None = None,
) -> Path:
    """Write `weights` (Hugging Face names and order) with matrices as `kind`, vectors as F32.

    `metadata` adds to or replaces the default one, or removes (`...`). `raw` gives tensors by our
    name as quantized bytes and their kind, for kinds that the library cannot quantize to.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (default_metadata(config) | dict(metadata or {})).items():
        if value is ...:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for hf_name, tensor in weights.items():
        name = from_hf_name(hf_name)
        assert name is not None
        module = name.split(".")[-2]
        if module in heads:
            tensor = permute(tensor, heads[module])
        tensor_kind = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        if raw is not None and name in raw:
            data, raw_kind = raw[name]
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[raw_kind])
        elif tensor_kind.name == "F32":
            writer.add_tensor(name, tensor.float().numpy())
        elif tensor_kind.name == "F16":
            writer.add_tensor(name, tensor.half().numpy())
        else:
            data = quantize(tensor.float().numpy(), tensor_kind)
            writer.add_tensor(name, data, raw_dtype=tensor_kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def default_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = tiny_tokenizer(min(config["vocab_size"], 270))
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    merges = [f"{a} {b}" for a, b in tiny_merges(set(tokens))]
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
        "llama.rope.freq_base": config["rope_theta"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            CONTROL if token in SPECIAL_TOKENS else NORMAL for token in tokens
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def tiny_merges(tokens: set[str]) -> list[tuple[str, str]]:
    """The merges of the tiny tokenizer whose result is a token."""
    return [(left, right) for left, right in MERGES if left + right in tokens]
