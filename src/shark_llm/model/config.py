"""What a Llama is, in numbers: read strictly from a Hugging Face config.json.

Strict means: every key is either read, or known not to change what the model computes, or refused
by name and value. Defaults of absent keys are those of transformers' `LlamaConfig` and
`MistralConfig`; the five sizes without which there is no model are required.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shark_llm.errors import ArtifactError, UnsupportedModelError
from shark_llm.model.config_values import (
    HARMLESS_KEYS,
    HARMLESS_VALUES,
    READ_KEYS,
    read_flag,
    read_positive,
    read_size,
    refuse,
)
from shark_llm.model.rope_config import RopeConfig, RopeType, rope_from_hf

__all__ = [
    "ModelConfig",
    "RopeConfig",
    "RopeType",
    "config_from_dict",
    "config_from_hf",
    "config_to_dict",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family. Sizes are the whole model's, not a rank's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    sliding_window: int | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    torch_dtype: str | None  # what config.json says; the tensors' own dtype is what counts
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


# architectures entry -> (the name we keep, the model_type it must stand with)
ARCHITECTURES = {
    "LlamaForCausalLM": ("LlamaForCausalLM", "llama"),
    "LLaMAForCausalLM": ("LlamaForCausalLM", "llama"),
    "MistralForCausalLM": ("MistralForCausalLM", "mistral"),
}


def config_from_hf(hf: Mapping[str, Any], *, more_eos_token_ids: Iterable[int] = ()) -> ModelConfig:
    """Read the content of a config.json.

    `more_eos_token_ids` (from generation_config.json and the tokenizer) join the config's own.
    Raises UnsupportedModelError, which names the key, the value and what is expected.
    """
    architecture, model_type = _architecture(hf)
    mistral = model_type == "mistral"
    for key in ("quantization_config", "compression_config"):
        if hf.get(key):
            method = hf[key].get("quant_method") if isinstance(hf[key], Mapping) else hf[key]
            refuse(key, method, "weights must be plain bf16, f16 or f32: use the unquantized model")
    _refuse_unknown_keys(hf)
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", hf["hidden_act"], "only silu is supported")
    if hf.get("partial_rotary_factor") not in (None, 1):
        refuse("partial_rotary_factor", hf["partial_rotary_factor"], "only 1.0 is supported")

    hidden_size = read_size(hf, "hidden_size")
    num_heads = read_size(hf, "num_attention_heads")
    if mistral and "num_key_value_heads" not in hf:
        num_kv_heads = 8  # MistralConfig's default; null means num_attention_heads, as for Llama
    else:
        num_kv_heads = read_size(hf, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        refuse(
            "num_key_value_heads", num_kv_heads, f"must divide num_attention_heads = {num_heads}"
        )
    if hf.get("head_dim") is None and hidden_size % num_heads:
        refuse("hidden_size", hidden_size, f"is no multiple of num_attention_heads = {num_heads}")
    head_dim = read_size(hf, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        refuse("head_dim", head_dim, "must be even for rotary position embedding")
    max_positions = read_size(hf, "max_position_embeddings", 131072 if mistral else 2048)
    if hf.get("max_sequence_length") not in (None, max_positions):
        refuse(
            "max_sequence_length",
            hf["max_sequence_length"],
            f"disagrees with max_position_embeddings = {max_positions}: remove one of them",
        )
    attention_bias, mlp_bias = read_flag(hf, "attention_bias"), read_flag(hf, "mlp_bias")
    if mistral and (attention_bias or mlp_bias):
        key = "attention_bias" if attention_bias else "mlp_bias"
        refuse(key, True, "MistralForCausalLM has no biases")
    vocab_size = read_size(hf, "vocab_size")
    bos_token_ids = _token_ids("bos_token_id", hf.get("bos_token_id", 1))
    if len(bos_token_ids) > 1 or any(token_id >= vocab_size for token_id in bos_token_ids):
        refuse(
            "bos_token_id", hf["bos_token_id"], f"must be one id below vocab_size = {vocab_size}"
        )
    eos_token_ids = _token_ids("eos_token_id", hf.get("eos_token_id", 2))
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=read_size(hf, "intermediate_size"),
        num_layers=read_size(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read_positive(hf, "rms_norm_eps", 1e-6),
        rope=rope_from_hf(hf, max_positions),
        max_position_embeddings=max_positions,
        sliding_window=_sliding_window(hf, mistral),
        tie_word_embeddings=read_flag(hf, "tie_word_embeddings"),
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        torch_dtype=_dtype_name(hf),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=tuple(dict.fromkeys([*eos_token_ids, *more_eos_token_ids])),
    )


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """The config as plain JSON values, for `Manifest.config`."""
    return dataclasses.asdict(config) | {"eos_token_ids": list(config.eos_token_ids)}


def config_from_dict(fields: Mapping[str, Any]) -> ModelConfig:
    """The inverse of `config_to_dict`. Raises ArtifactError on missing or unknown fields."""
    try:
        rope = RopeConfig(**fields["rope"])
        return ModelConfig(
            **{**fields, "rope": rope, "eos_token_ids": tuple(fields["eos_token_ids"])}
        )
    except (KeyError, TypeError) as error:
        raise ArtifactError(
            f"the model config in the manifest has missing or unknown fields ({error}):"
            " rebuild the bundle with this version of shark-llm"
        ) from error


def _architecture(hf: Mapping[str, Any]) -> tuple[str, str]:
    names, model_type = hf.get("architectures"), hf.get("model_type")
    supported = ", ".join(sorted({name for name, _ in ARCHITECTURES.values()}))
    if names is None and model_type is not None:
        names = [name for name, kind in ARCHITECTURES.values() if kind == model_type][:1]
        if not names:
            refuse("model_type", model_type, f"supported architectures are {supported}")
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in ARCHITECTURES:
        refuse("architectures", names, f"supported are {supported}")
    architecture, expected_type = ARCHITECTURES[names[0]]
    if model_type not in (None, expected_type):
        refuse("model_type", model_type, f"{architecture} goes with {expected_type!r}")
    return architecture, expected_type


def _refuse_unknown_keys(hf: Mapping[str, Any]) -> None:
    unknown = {
        key: value
        for key, value in hf.items()
        if key not in READ_KEYS
        and key not in HARMLESS_KEYS
        and not key.startswith(
            "_"
        )  # by custom notes about the file: _name_or_path, _commit_hash ...
        and not _says_nothing(value)
        and not (key in HARMLESS_VALUES and value == HARMLESS_VALUES[key])
    }
    if unknown:
        listed = ", ".join(f"{key} = {value!r}" for key, value in sorted(unknown.items()))
        raise UnsupportedModelError(
            f"config.json: not understood: {listed}; what could change the model's results is not"
            " ignored: remove the key if it does not, or use a supported model"
        )


def _says_nothing(value: Any) -> bool:
    """Null, false and empty values switch nothing on. (0 is a number like others, and could.)"""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    """One id, a list of ids, or null."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        refuse(key, value, "must be a token id or a list of token ids")
    return tuple(ids)


def _dtype_name(hf: Mapping[str, Any]) -> str | None:
    names = {key: hf[key] for key in ("torch_dtype", "dtype") if hf.get(key) is not None}
    for key, value in names.items():
        if not isinstance(value, str):
            refuse(key, value, "must be the name of a dtype, such as bfloat16")
    distinct = {name.removeprefix("torch.") for name in names.values()}
    if len(distinct) > 1:
        refuse("dtype", hf["dtype"], f"disagrees with torch_dtype = {hf['torch_dtype']!r}")
    return distinct.pop() if distinct else None


def _sliding_window(hf: Mapping[str, Any], mistral: bool) -> int | None:
    window = hf.get("sliding_window", 4096 if mistral else None)  # absent: MistralConfig's default
    if window is not None and not mistral:
        refuse("sliding_window", window, "LlamaForCausalLM attends to all positions: remove it")
    kind = "full_attention" if window is None else "sliding_attention"
    layer_types = hf.get("layer_types") or []
    if not isinstance(layer_types, list) or any(entry != kind for entry in layer_types):
        refuse("layer_types", layer_types, f"with this sliding_window, all must be {kind!r}")
    return None if window is None else read_size(hf, "sliding_window", 4096)
