"""A .gguf file of a Llama: quantized weights are dequantized to float32, row by row, when read.

Two things differ from the Hugging Face form and are undone here. The rows of attn_q and attn_k are
permuted: llama.cpp rotates neighbouring dimensions (2j, 2j + 1), Hugging Face dimension j with
j + head_dim/2. And llama3 rope is no metadata but a tensor of factors, `rope_freqs.weight`.

D below is head_dim.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from shark_llm.artifacts.manifest import ByteProgress, digest_files
from shark_llm.checkpoint.gguf_file import GgufTensor, read_gguf
from shark_llm.checkpoint.gguf_tokenizer import special_token_ids, tokenizer_files
from shark_llm.checkpoint.names import check_weight_map, expected_parameters
from shark_llm.checkpoint.source import FileExtent, ParameterInfo, read_at
from shark_llm.errors import CheckpointError, UnsupportedModelError
from shark_llm.model.config import ModelConfig, config_from_hf

PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
QUANTIZED = {
    GGMLQuantizationType[name]
    for name in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
}
DEQUANTIZE_BYTES = 4 << 20  # quantized bytes at a time: the library's temporaries take ~10x more
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
IGNORED_SUFFIX = ".attn_rot_embd.weight"

# metadata "llama.*" -> config.json
CONFIG_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
# Keys that this module reads otherwise, or that are fine with the values named.
OTHER_KEYS: dict[str, Any] = {
    "attention.key_length": ...,
    "attention.value_length": ...,
    "rope.dimension_count": ...,
    "vocab_size": ...,
    "rope.scaling.type": ...,
    "rope.scaling.factor": ...,
    "rope.scaling.original_context_length": ...,
    "rope.scaling.finetuned": ...,
    "rope.scaling.yarn_beta_fast": ...,
    "rope.scaling.yarn_beta_slow": ...,
    "rope.scale_linear": ...,
    "tensor_data_layout": ...,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
}


class GgufCheckpoint:
    """A `Checkpoint` in one .gguf file.

    `read` returns float32 for quantized tensors and their own dtype for F32, F16 and BF16.
    `aux_files` are rebuilt from the metadata. Raises CheckpointError, UnsupportedModelError or
    WeightMapError.
    """

    config: ModelConfig
    parameters: Mapping[str, ParameterInfo]
    aux_files: Mapping[str, bytes]
    notes: tuple[str, ...]

    def __init__(self, path: Path) -> None:
        self._path = path
        file = read_gguf(path)
        metadata = file.metadata
        if metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{path}: is part of {metadata['split.count']} files: join them with"
                " `llama-gguf-split --merge`"
            )
        self._tensors = {
            name: tensor
            for name, tensor in file.tensors.items()
            if not name.endswith(IGNORED_SUFFIX)
        }
        rope_factors = self._tensors.pop("rope_freqs.weight", None)
        unfit = [
            f"{name} ({tensor.kind.name})"
            for name, tensor in self._tensors.items()
            if tensor.kind not in PLAIN and tensor.kind not in QUANTIZED
        ]
        if unfit:
            raise CheckpointError(
                f"{path}: {len(unfit)} tensors of unsupported types: {', '.join(unfit)};"
                " requantize the model, for instance to Q8_0"
            )
        hf_config = _hf_config(path, metadata, self._tensors)
        if rope_factors is not None:
            factors = self._rows(rope_factors, 0, rope_factors.shape[0]).float().flatten().numpy()
            hf_config["rope_scaling"] = _llama3_rope(path, hf_config, factors)
        try:
            self.config = config_from_hf(hf_config)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{path}, as {error}") from error
        expected = expected_parameters(self.config)
        check_weight_map(
            str(path),
            self.config,
            {name: tensor.shape for name, tensor in self._tensors.items() if name in expected},
            [name for name in self._tensors if name not in expected],
        )
        self.parameters = {
            name: ParameterInfo(shape=tensor.shape, dtype=PLAIN.get(tensor.kind, torch.float32))
            for name, tensor in self._tensors.items()
        }
        self.aux_files = _aux_files(path, metadata, hf_config, self.config)
        self.notes = ()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start .. stop - 1 of dimension 0 in Hugging Face's order, in fresh memory."""
        tensor = self._tensors[name]
        assert 0 <= start <= stop <= tensor.shape[0], f"{name}: {start}..{stop}"
        if not _is_permuted(name):
            return self._rows(tensor, start, stop)
        # Row h * D + s * D/2 + j of ours is row h * D + 2j + s of the file (s = 0, 1), so whole
        # heads are read and the wanted rows picked from them.
        head_dim = self.config.head_dim
        first, last = start // head_dim * head_dim, -(-stop // head_dim) * head_dim
        wanted = torch.arange(start, stop)
        within = wanted % head_dim
        half, pair = within // (head_dim // 2), within % (head_dim // 2)
        return self._rows(tensor, first, last)[wanted - within - first + 2 * pair + half]

    def extent(self, name: str) -> FileExtent | None:
        """Where the parameter lies; None for what is quantized, or has its rows in GGUF's order."""
        tensor = self._tensors[name]
        if tensor.kind not in PLAIN or _is_permuted(name):
            return None
        return FileExtent(path=self._path, offset=tensor.offset)

    @property
    def quantized_as(self) -> str | None:
        kinds = {tensor.kind.name for tensor in self._tensors.values() if tensor.kind in QUANTIZED}
        return ", ".join(sorted(kinds)) or None

    @property
    def weight_paths(self) -> tuple[Path, ...]:
        return (self._path,)

    def digest(self, progress: ByteProgress | None = None) -> str:
        """sha256 of the file's content, header included: names, shapes, types and bytes."""
        name = self._path.name
        return digest_files(self._path.parent, [name], progress)[name].sha256

    def _rows(self, tensor: GgufTensor, start: int, stop: int) -> torch.Tensor:
        """Rows of dimension 0 in the file's order. A vector counts as one row of the format."""
        shape = (stop - start, *tensor.shape[1:])
        if tensor.kind in PLAIN:
            dtype = PLAIN[tensor.kind]
            row_bytes = math.prod(tensor.shape[1:]) * dtype.itemsize
            data = read_at(
                self._path, tensor.offset + start * row_bytes, (stop - start) * row_bytes
            )
            return data.view(dtype).reshape(shape)
        if len(tensor.shape) == 1:
            data = read_at(self._path, tensor.offset, tensor.row_bytes)
            return torch.from_numpy(dequantize(data.numpy(), tensor.kind))[start:stop].clone()
        assert len(tensor.shape) == 2, tensor
        out = torch.empty(shape, dtype=torch.float32)
        step = max(1, DEQUANTIZE_BYTES // tensor.row_bytes)
        for row in range(start, stop, step):
            count = min(step, stop - row)
            data = read_at(
                self._path, tensor.offset + row * tensor.row_bytes, count * tensor.row_bytes
            ).reshape(count, tensor.row_bytes)
            out[row - start : row - start + count] = torch.from_numpy(
                dequantize(data.numpy(), tensor.kind)
            )
        return out


def _is_permuted(name: str) -> bool:
    """Whether the file has the rows of each head in an order of its own."""
    return name.rpartition(".")[0].endswith((".attn_q", ".attn_k"))


def _hf_config(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> dict[str, Any]:
    """The config.json that says what the metadata says. What cannot be said is refused."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(
            f"{path}: general.architecture = {architecture!r}, supported is llama"
        )
    llama = {
        key.removeprefix("llama."): value
        for key, value in metadata.items()
        if key.startswith("llama.")
    }
    for key, value in llama.items():
        known = key in CONFIG_KEYS or OTHER_KEYS.get(key) in (..., value)
        if not known:
            raise UnsupportedModelError(f"{path}: llama.{key} = {value!r}: not understood")
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {hf: llama[key] for key, hf in CONFIG_KEYS.items() if key in llama}
    if isinstance(config.get("rms_norm_eps"), float):
        config["rms_norm_eps"] = _shortest(config["rms_norm_eps"])
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: holds no token_embd.weight: no language model")
    config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    if llama.get("vocab_size", config["vocab_size"]) != config["vocab_size"]:
        raise CheckpointError(
            f"{path}: llama.vocab_size = {llama['vocab_size']}, but token_embd.weight has"
            f" {config['vocab_size']} rows: config and weights are not of the same model"
        )
    head_dims = {
        key: llama[key]
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        if key in llama
    }
    if len(set(head_dims.values())) > 1:
        raise UnsupportedModelError(f"{path}: head sizes that differ: {head_dims}")
    config["head_dim"] = next(iter(head_dims.values()), None)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    config["rope_scaling"] = _rope_scaling(path, llama)
    special = special_token_ids(metadata)
    config |= {f"{name}_token_id": special.get(name) for name in ("bos", "pad")}
    eos = [metadata.get(f"tokenizer.ggml.{key}") for key in EOS_KEYS]
    config["eos_token_id"] = list(dict.fromkeys(i for i in eos if i is not None)) or None
    return config


def _shortest(value: float) -> float:
    """The metadata's float32 as the shortest decimal that means it: 1e-05 and not 9.9999997e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(path: Path, llama: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = llama.get("rope.scaling.type", "linear" if "rope.scale_linear" in llama else "none")
    factor = llama.get("rope.scaling.factor", llama.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{path}: llama.rope.scaling.type = {kind!r}, supported are none, linear, yarn"
        )
    scaling = {"rope_type": "yarn", "factor": factor}
    names = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    return scaling | {
        hf: llama[f"rope.scaling.{key}"]
        for key, hf in names.items()
        if f"rope.scaling.{key}" in llama
    }


def _llama3_rope(
    path: Path, config: Mapping[str, Any], factors: np.ndarray[Any, np.dtype[np.float32]]
) -> dict[str, Any] | None:
    """The llama3 parameters of which `rope_freqs.weight` holds the result, checked by recomputing.

    The converter writes, for each angle, the number to divide it by: 1 for short wavelengths,
    `factor` for long ones, a blend between. The other three parameters are those of
    every Llama 3.1 to 3.3.
    """
    if np.all(factors == 1):
        return None
    if config["rope_scaling"] is not None:
        raise UnsupportedModelError(f"{path}: has rope_freqs.weight and rope scaling: not both")
    # Rounded: a quotient of float32 numbers may miss the decimal that a config says.
    factor, low, high, original = round(float(factors.max()), 4), 1.0, 4.0, 8192
    half = len(factors)
    theta = float(config.get("rope_theta", 10000.0))
    wavelengths = 2 * math.pi * theta ** (np.arange(half, dtype=np.float64) / half)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{path}: rope_freqs.weight is not the llama3 scaling by {factor} of theta {theta} from"
            f" {original} positions: use the model's safetensors"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _aux_files(
    path: Path, metadata: Mapping[str, Any], hf_config: Mapping[str, Any], config: ModelConfig
) -> dict[str, bytes]:
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    return {
        "config.json": (json.dumps({**hf_config, "hidden_act": "silu"}, indent=2) + "\n").encode(),
        "generation_config.json": (json.dumps(generation, indent=2) + "\n").encode(),
        **tokenizer_files(path, metadata),
    }
