"""Tiny bundles for tests: real archives and manifest, a module that is just some bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shark_llm.artifacts.irpa import Identity, archive_name, archive_ranks
from shark_llm.artifacts.manifest import Manifest, Source, Target
from shark_llm.artifacts.publish import Staging, publish
from shark_llm.model.config import ModelConfig, RopeConfig, config_from_hf, config_to_dict
from shark_llm.sharding.archives import write_dummy_archives
from shark_llm.sharding.plan import plan_parameters

VERSIONS = {"iree-base-compiler": "3.13.0", "iree-base-runtime": "3.13.0"}


T0 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=512,
    sliding_window=None,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    torch_dtype="float32",
    bos_token_id=1,
    eos_token_ids=(2,),
)


def model_config(**overrides: Any) -> ModelConfig:
    """T0 as a ModelConfig, with Hugging Face keys as overrides."""
    from tiny import tiny_config  # imports torch, which processes that only publish do without

    return config_from_hf(tiny_config(**overrides))


def sample_manifest(*, tp: int = 2, digest: str = "a" * 64, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "source": Source(name="tiny/t0", revision=None, digest=digest),
        "config": config_to_dict(T0),
        "weights": "dummy",
        "dtype": "f32",
        "kv_dtype": "f32",
        "tp": tp,
        "plan": plan_parameters(T0, tp),
        "page_size": 16,
        "max_model_len": 512,
        "vocab_size": 256,
        "eos_token_ids": (2,),
        "bos_token_id": 1,
        "entry_points": (),
        "softmax_sums": (),
        "caches": (),
        "module_key": "b" * 64,
        "archives": tuple(archive_name(rank) for rank in archive_ranks(tp)),
        "target": Target(name="host", driver="local-task", flags=("--some-flag=1",)),
        "versions": VERSIONS,
        "golden": None,
        "files": {},
    }
    return Manifest(**(fields | changes))


def fill(staging: Staging, *, tp: int = 2, digest: str = "a" * 64, module: bytes = b"vmfb") -> None:
    """Write archives and a module into `staging` and seal it."""
    write_dummy_archives(
        T0,
        plan_parameters(T0, tp),
        identity=Identity(model=digest, tp=tp, rank=None, dtype="f32"),
        out_dir=staging.path,
    )
    (staging.path / "model.vmfb").write_bytes(module)
    staging.seal(sample_manifest(tp=tp, digest=digest))


def publish_sample(
    path: Path, *, tp: int = 2, digest: str = "a" * 64, module: bytes = b"vmfb"
) -> Path:
    with publish(path) as staging:
        fill(staging, tp=tp, digest=digest, module=module)
    return path
