"""config.json is read strictly; transformers is the judge of what a config means."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shark_llm.errors import ArtifactError, UnsupportedModelError
from shark_llm.model.config import (
    RopeConfig,
    config_from_dict,
    config_from_hf,
    config_to_dict,
)
from tiny import tiny_config

PUBLISHED = sorted((Path(__file__).parent.parent / "published_configs").glob("*.json"))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def refusal(**overrides: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        config_from_hf(tiny_config(**overrides))
    return str(caught.value)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_config_reads_as_transformers_reads_it(path: Path) -> None:
    """Cases G: shapes of published models."""
    hf = json.loads(path.read_text(encoding="utf-8"))
    config = config_from_hf(hf)
    judge = (MistralConfig if hf["model_type"] == "mistral" else LlamaConfig)(**hf)
    assert config.num_kv_heads == judge.num_key_value_heads
    assert config.head_dim == judge.head_dim
    assert config.rope.theta == judge.rope_parameters["rope_theta"]
    assert config.rope.rope_type == judge.rope_parameters["rope_type"]
    assert config.max_position_embeddings == judge.max_position_embeddings
    assert config.sliding_window == getattr(judge, "sliding_window", None)
    assert config.tie_word_embeddings == judge.tie_word_embeddings
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_there_are_published_configs() -> None:
    assert len(PUBLISHED) >= 20


@pytest.mark.parametrize("judge", [LlamaConfig, MistralConfig])
def test_absent_keys_have_the_defaults_of_transformers(judge: type[Any]) -> None:
    default = judge()
    architecture = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = config_from_hf(
        {
            "architectures": [architecture[default.model_type]],
            "num_attention_heads": default.num_attention_heads,
            **{size: getattr(default, size) for size in sizes},
        }
    )
    assert config.num_kv_heads == default.num_key_value_heads
    assert config.head_dim == default.head_dim
    assert config.rms_norm_eps == default.rms_norm_eps
    assert config.rope == RopeConfig(theta=default.rope_parameters["rope_theta"])
    assert config.max_position_embeddings == default.max_position_embeddings
    assert config.sliding_window == getattr(default, "sliding_window", None)
    assert config.bos_token_id == default.bos_token_id
    assert config.eos_token_ids == (default.eos_token_id,)
    flags = (config.tie_word_embeddings, config.attention_bias, config.mlp_bias)
    assert flags == (False, False, False)


def test_null_kv_heads_of_mistral_mean_all_heads() -> None:
    hf = tiny_config(
        architectures=["MistralForCausalLM"], model_type="mistral", num_key_value_heads=None
    )
    assert config_from_hf(hf).num_kv_heads == 4


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"architectures": ["GraniteForCausalLM"], "model_type": "granite"}, "GraniteForCausalLM"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "Qwen2ForCausalLM"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "Qwen3ForCausalLM"),
        ({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}, "Phi3ForCausalLM"),
        ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}, "Gemma2ForCausalLM"),
        ({"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}, "OlmoForCausalLM"),
        ({"architectures": ["CohereForCausalLM"], "model_type": "cohere"}, "CohereForCausalLM"),
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"architectures": ...}, ""),
        ({"model_type": "granite"}, "granite"),
        ({"embedding_multiplier": 12}, "embedding_multiplier = 12"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"layer_types": 2}, "layer_types = 2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size = 64"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"vocab_size": ...}, "vocab_size = None"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id"),
        ({"bos_token_id": 256}, "bos_token_id = 256"),
        ({"dtype": "bfloat16"}, "disagrees with torch_dtype"),
        ({"max_sequence_length": 4096}, "max_sequence_length = 4096"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = 'fp8'"),
    ],
)
def test_what_is_not_understood_is_refused_by_key_and_value(
    overrides: dict[str, Any], named: str
) -> None:
    hf = tiny_config(**overrides)
    if overrides == {"architectures": ...}:
        assert config_from_hf(hf).architecture == "LlamaForCausalLM"  # model_type says it
        return
    message = refusal(**overrides)
    assert named in message
    assert "\n" not in message


def test_harmless_keys_are_passed_over() -> None:
    """Cases G, SmolLM2: `is_llama_config`, `rope_interleaved: false` and the like."""
    hf = tiny_config(
        is_llama_config=True,
        rope_interleaved=False,
        initializer_range=0.02,
        pretraining_tp=1,
        transformers_version="4.40.1",
        attention_dropout=0.0,
        pad_token_id=-1,
        use_cache=True,
        some_new_switch=False,
        quantization_config=None,
        layer_types=["full_attention"] * 2,
        max_sequence_length=512,
    )
    assert config_from_hf(hf) == config_from_hf(tiny_config())


def test_old_spelling_of_the_architecture() -> None:
    assert config_from_hf(tiny_config(architectures=["LLaMAForCausalLM"])) == config_from_hf(
        tiny_config()
    )


def test_explicit_head_dim_counts() -> None:
    """A05: head_dim 64 where hidden/heads is 40; null means the quotient."""
    sizes = {"hidden_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert config_from_hf(tiny_config(**sizes, head_dim=64)).head_dim == 64
    assert config_from_hf(tiny_config(**sizes, head_dim=None)).head_dim == 40


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "linear", "type": "linear", "factor": 4.0},
    ],
)
def test_type_and_rope_type_mean_the_same(scaling: dict[str, Any]) -> None:
    """A06"""
    config = config_from_hf(tiny_config(rope_scaling=scaling))
    assert config.rope == RopeConfig(rope_type="linear", factor=4.0)


@pytest.mark.parametrize("scaling", [{"type": "default"}, {"rope_type": "default"}, {}, None, ...])
def test_default_rope_has_many_spellings(scaling: Any) -> None:
    """A06"""
    assert config_from_hf(tiny_config(rope_scaling=scaling)).rope == RopeConfig()


def test_types_that_disagree_are_refused() -> None:
    """A06"""
    message = refusal(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 4})
    assert "rope_scaling.type = 'linear': disagrees with rope_type = 'yarn'" in message


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3, YARN])
def test_theta_inside_rope_parameters(rope: dict[str, Any]) -> None:
    """A07: transformers 5 writes all of rope into `rope_parameters`; theta may be an int."""
    parameters = rope | {"rope_theta": 100000}
    new = config_from_hf(tiny_config(rope_theta=..., rope_scaling=..., rope_parameters=parameters))
    old = config_from_hf(tiny_config(rope_theta=100000.0, rope_scaling=rope))
    both = config_from_hf(
        tiny_config(rope_theta=100000.0, rope_scaling=rope, rope_parameters=parameters)
    )
    inner = config_from_hf(
        tiny_config(rope_theta=..., rope_scaling=rope, rope_parameters=parameters)
    )
    assert new.rope.theta == 100000.0
    assert new.rope == old.rope == both.rope == inner.rope


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 100000}},
        {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 32.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": YARN},
        {"original_max_position_embeddings": 4096, "rope_scaling": LLAMA3},
    ],
)
def test_old_and_new_rope_keys_that_disagree_are_refused(overrides: dict[str, Any]) -> None:
    """A07 (choice: refuse)"""
    assert "disagrees with" in refusal(**overrides)


def test_rope_nested_by_layer_type_is_refused() -> None:
    """A07"""
    assert "full_attention" in refusal(rope_parameters={"full_attention": {"rope_theta": 1e4}})


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),  # A09 (choice: refuse)
        ({"rope_type": "banana", "factor": 2}, "'banana'"),
        ({"rope_type": ["linear"], "factor": 2}, "['linear']"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "'longrope'"),
        ({"rope_type": "linear", "factor": 0}, "factor = 0"),
        ({"rope_type": "linear", "factor": -4.0}, "factor = -4.0"),
        ({"rope_type": "linear", "factor": "4.0"}, "factor = '4.0'"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor = nan"),
        ({"rope_type": "linear"}, "factor = None"),
        ({"rope_type": "linear", "factor": 4.0, "alpha": 2}, "alpha = 2"),
        ({"rope_type": "default", "factor": 4.0}, "factor = 4.0"),
        ("linear", "rope_scaling = 'linear'"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor = 1.0"),
        (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor = None"),
        (YARN | {"beta_fast": 0.5}, "beta_fast = 0.5"),
        (YARN | {"truncate": None}, "truncate = None"),
        (YARN | {"attention_factor": -1.0}, "attention_factor = -1.0"),
    ],
)
def test_rope_that_is_not_understood_is_refused(scaling: Any, named: str) -> None:
    """A09, A10"""
    assert named in refusal(rope_scaling=scaling)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"attention_factor": 1.2079},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 0.707},
        {"factor": None},
        {"original_max_position_embeddings": None},
    ],
)
def test_yarn_parameters_mean_what_transformers_takes_them_for(extra: dict[str, Any]) -> None:
    scaling = {k: v for k, v in (YARN | extra).items() if v is not None or k == "factor"}
    hf = tiny_config(rope_scaling=dict(scaling))
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**tiny_config(rope_scaling=scaling)))
    rope = config_from_hf(hf).rope
    assert rope.factor == 4.0
    computed = 0.1 * math.log(rope.factor) + 1.0
    assert (rope.attention_factor or computed) == pytest.approx(factor)
    assert rope.original_max_position_embeddings == (
        512 if "original_max_position_embeddings" in extra else 128
    )


@pytest.mark.parametrize("value", [2, [2], [2, 2]])
def test_eos_ids_are_united_in_order(value: Any) -> None:
    """A11"""
    config = config_from_hf(tiny_config(eos_token_id=value), more_eos_token_ids=[3, 4, 2, 5])
    assert config.eos_token_ids == (2, 3, 4, 5)


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_both_spellings_of_dtype(key: str, value: str) -> None:
    """A27"""
    hf = tiny_config(torch_dtype=...) | {key: value}
    assert config_from_hf(hf).torch_dtype == "bfloat16"


@pytest.mark.parametrize("change", [{"rope": ...}, {"hidden_size": ...}, {"colour": "red"}])
def test_a_foreign_dict_is_refused(change: dict[str, Any]) -> None:
    fields = config_to_dict(config_from_hf(tiny_config())) | change
    with pytest.raises(ArtifactError, match="missing or unknown fields"):
        config_from_dict({key: value for key, value in fields.items() if value is not ...})
