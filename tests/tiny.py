"""Tiny random checkpoints in the Hugging Face layout, for every test that needs one.

The base is T0 of the failure cases: hidden 64, 4 query heads, 2 kv heads, head_dim 16, 2 layers,
mlp 128, vocab 256, 512 positions, untied, eps 1e-5, float32, fixed seed. All can be overridden:

    directory = write_tiny(tmp_path / "t0")
    directory = write_tiny(tmp_path / "a", config=tiny_config(tie_word_embeddings=True), shards=2)

The tokenizer is a real byte-level BPE. Its 256 ids cover every byte that can occur in UTF-8 text,
six special tokens and seven merges:

    0 <unk>   1 <s> (bos)   2 </s> (eos)   3 <|im_start|>   4 <|im_end|>   5 <|end|>
    6 .. 248  single bytes, printable ASCII first    249 ..  merges
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# "Ġ" is how byte-level BPE writes a space.
MERGES = (
    ("Ġ", "t"), ("h", "e"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("Ġt", "he"), ("o", "n"),
    ("r", "e"), ("Ġ", "s"), ("Ġ", "w"), ("a", "t"), ("n", "d"), ("e", "n"), ("Ġ", "c"),
    ("i", "s"), ("o", "r"), ("Ġ", "b"), ("e", "s"), ("Ġ", "f"), ("in", "g"), ("o", "u"),
)  # fmt: skip


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The config.json of T0 with `overrides`; a value of `...` removes the key."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    } | overrides
    return {key: value for key, value in config.items() if value is not ...}


def tiny_weights(
    config: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random weights for `config` by Hugging Face name, scaled so that activations stay near 1.

    Norm weights and biases are far from 1 and 0, so that one left out changes the logits visibly.
    No `lm_head.weight` when the config ties the embeddings.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    weights: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=1.0)
    }

    def linear(name: str, out_features: int, in_features: int, bias: bool) -> None:
        weights[f"{name}.weight"] = normal(out_features, in_features, std=in_features**-0.5)
        if bias:
            weights[f"{name}.bias"] = normal(out_features, std=0.5)

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        attention_bias = bool(config.get("attention_bias", False))
        mlp_bias = bool(config.get("mlp_bias", False))
        weights[f"{prefix}.input_layernorm.weight"] = 1 + normal(hidden, std=0.25)
        linear(f"{prefix}.self_attn.q_proj", heads * head_dim, hidden, attention_bias)
        linear(f"{prefix}.self_attn.k_proj", kv_heads * head_dim, hidden, attention_bias)
        linear(f"{prefix}.self_attn.v_proj", kv_heads * head_dim, hidden, attention_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim, attention_bias)
        weights[f"{prefix}.post_attention_layernorm.weight"] = 1 + normal(hidden, std=0.25)
        linear(f"{prefix}.mlp.gate_proj", mlp, hidden, mlp_bias)
        linear(f"{prefix}.mlp.up_proj", mlp, hidden, mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, mlp, mlp_bias)
    weights["model.norm.weight"] = 1 + normal(hidden, std=0.25)
    if not config.get("tie_word_embeddings", False):
        # Logits with a spread of about 3, so that greedy choices have a clear winner.
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, std=3 * hidden**-0.5)
    return weights


def tiny_tokenizer(vocab_size: int = 256) -> Tokenizer:
    """A byte-level BPE with exactly `vocab_size` ids (7 to 270), which puts <s> before every text.

    Below 249 ids some bytes have none and become <unk>.
    """
    alphabet = _byte_alphabet()
    used_bytes = [*range(0x20, 0x7F), 0x0A, 0x09, 0x0D, *range(0x80, 0xC0), *range(0xC2, 0xF5)]
    used_bytes += [byte for byte in range(0x80) if byte not in used_bytes]
    tokens = [*SPECIAL_TOKENS, *(alphabet[byte] for byte in used_bytes)]
    tokens += [left + right for left, right in MERGES]
    if not len(SPECIAL_TOKENS) < vocab_size <= len(tokens):
        raise ValueError(f"vocab_size {vocab_size} is not in 7 .. {len(tokens)}")
    vocab = {token: index for index, token in enumerate(tokens[:vocab_size])}
    merges = [(left, right) for left, right in MERGES if left + right in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def write_tiny_tokenizer(
    directory: Path, *, vocab_size: int = 256, eos_token: str = "</s>", chat_template: bool = True
) -> None:
    """Write tokenizer.json and tokenizer_config.json into `directory`."""
    tiny_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": eos_token,
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if chat_template:
        tokenizer_config["chat_template"] = CHAT_TEMPLATE
    write_json(directory / "tokenizer_config.json", tokenizer_config)


def write_tiny_weights(
    directory: Path, weights: Mapping[str, torch.Tensor], *, shards: int = 1
) -> None:
    """Write `weights` as model.safetensors, or as `shards` files of equal count with an index."""
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(dict(weights), directory / "model.safetensors", metadata)
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        save_file({name: weights[name] for name in part}, directory / file_name, metadata)
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_tiny(
    directory: Path,
    *,
    config: Mapping[str, Any] | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = True,
    tokenizer_vocab_size: int | None = None,
    eos_token: str = "</s>",
    chat_template: bool = True,
) -> Path:
    """Write a whole checkpoint directory and return it.

    `config` is a whole config.json (see `tiny_config`), T0 by default. `weights` by Hugging Face
    name replace the random ones, for instance to leave one out. `dtype` is the tensors' dtype, and
    stands in config.json only when the default config is used.
    """
    if config is None:
        config = tiny_config(torch_dtype=str(dtype).removeprefix("torch."))
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    if generation_config is not None:
        write_json(directory / "generation_config.json", generation_config)
    if weights is None:
        weights = tiny_weights(config, seed=seed, dtype=dtype)
    write_tiny_weights(directory, weights, shards=shards)
    if tokenizer:
        largest = len(SPECIAL_TOKENS) + 243 + len(MERGES)
        write_tiny_tokenizer(
            directory,
            vocab_size=tokenizer_vocab_size or min(config["vocab_size"], largest),
            eos_token=eos_token,
            chat_template=chat_template,
        )
    return directory


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (as GPT-2 does)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + unprintable.index(byte))
        for byte in range(256)
    ]
