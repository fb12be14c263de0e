"""The keys of a config.json that are known, and typed readers for their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from shark_llm.errors import UnsupportedModelError

# fmt: off
READ_KEYS = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "original_max_position_embeddings", "max_position_embeddings", "max_sequence_length",
    "sliding_window", "layer_types", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "quantization_config",
    "compression_config",
})

# Keys that do not change the logits: training, bookkeeping, generation defaults, kernels.
# pretraining_tp only says in how many slices a matmul was once done (transformers 5 ignores it).
HARMLESS_KEYS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
    "_name_or_path", "attention_dropout", "attention_probs_dropout_prob", "attn_implementation",
    "attn_pdrop", "base_model_tp_plan", "base_model_pp_plan", "bad_words_ids",
    "begin_suppress_tokens", "cache_implementation", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "embd_pdrop", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob",
    "id2label", "initializer_range", "is_decoder", "is_llama_config", "keys_to_ignore_at_inference",
    "label2id", "length_penalty", "max_length", "max_new_tokens", "min_length", "mlp_dropout",
    "model_max_length", "name_or_path", "neftune_noise_alpha", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tokenizer_class",
    "top_k", "top_p", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
    "unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache", "use_return_dict",
})
# fmt: on

# Keys that are fine with exactly one value (and, as every key, with null, false or empty).
HARMLESS_VALUES: dict[str, Any] = {"chunk_size_feed_forward": 0}


def refuse(key: str, value: Any, expectation: str) -> NoReturn:
    """Raise UnsupportedModelError, naming key, value and what is expected."""
    raise UnsupportedModelError(f"config.json: {key} = {value!r}: {expectation}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_size(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive whole number; null counts as absent."""
    value = hf.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(key, value, "must be a positive whole number")
    return value


def read_positive(values: Mapping[str, Any], key: str, default: float, where: str = "") -> float:
    value = values.get(key)
    if value is None:
        value = default
    if not is_number(value) or value <= 0:
        refuse(where + key, value, "must be a positive number")
    return float(value)


def read_flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = hf.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(key, value, "must be true or false")
    return value
