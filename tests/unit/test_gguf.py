"""A GGUF is read as transformers reads it; quantized kinds as the gguf library dequantizes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shark_llm.checkpoint.export_hf import export_hf
from shark_llm.checkpoint.names import to_hf_name
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.checkpoint.source import Checkpoint, iter_row_blocks
from shark_llm.errors import CheckpointError, SharkError, UnsupportedModelError, WeightMapError
from shark_llm.model.config import RopeConfig
from tiny import tiny_config, tiny_weights
from tiny_gguf import write_tiny_gguf

CONFIG = tiny_config(hidden_size=128, head_dim=16, intermediate_size=256)


def write(path: Path, config: dict[str, Any] = CONFIG, **options: Any) -> Path:
    weights = options.pop("weights", None) or tiny_weights(config)
    return write_tiny_gguf(path / "tiny.gguf", config, weights, **options)


def refusal(path: Path, error: type[SharkError] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def read_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat(list(iter_row_blocks(checkpoint, name, max_bytes=3000)))
        for name in checkpoint.parameters
    }


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weights_read_as_transformers_reads_them(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind=kind)
    checkpoint = open_checkpoint(path)
    judge = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    read = read_all(checkpoint)
    assert {to_hf_name(name) for name in read} == set(judge)
    for name, tensor in read.items():
        assert tensor.dtype == checkpoint.parameters[name].dtype
        assert torch.equal(tensor.float(), judge[to_hf_name(name)]), name


def test_own_dtypes_are_kept(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in tiny_weights(CONFIG).items()}
    checkpoint = open_checkpoint(write(tmp_path, kind="BF16", weights=weights))
    read = checkpoint.read("blk.1.attn_k.weight", 0, 32)
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, weights["model.layers.1.self_attn.k_proj.weight"])


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_read_as_the_library_dequantizes_them(tmp_path: Path, kind: str) -> None:
    quant_type = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quant_type]
    blocks = np.random.default_rng(0).integers(
        0, 0x40, (128, 256 // block_size * block_bytes), dtype=np.uint8
    )
    expected = dequantize(blocks, quant_type)
    path = write(tmp_path, raw={"blk.0.ffn_down.weight": (blocks, kind)})
    read = read_all(open_checkpoint(path))["blk.0.ffn_down.weight"].numpy()
    np.testing.assert_array_equal(read, expected)
    assert np.isfinite(expected).all()
    assert expected.any()


def test_any_rows_of_permuted_weights_and_biases(tmp_path: Path) -> None:
    config = CONFIG | {"attention_bias": True}
    weights = tiny_weights(config)
    checkpoint = open_checkpoint(write(tmp_path, config, weights=weights))
    assert checkpoint.config.attention_bias
    assert not checkpoint.config.mlp_bias
    for kind in ("weight", "bias"):
        for name in (f"blk.0.attn_q.{kind}", f"blk.0.attn_k.{kind}", f"blk.0.attn_v.{kind}"):
            expected = weights[to_hf_name(name)]
            rows = len(expected)
            for start, stop in [(0, rows), (0, 0), (1, 2), (7, 19), (15, 17), (rows - 1, rows)]:
                assert torch.equal(checkpoint.read(name, start, stop), expected[start:stop]), name


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_extents_hold_what_is_read(tmp_path: Path, kind: str) -> None:
    """Of what is quantized, or has its rows in GGUF's order, there is none."""
    checkpoint = open_checkpoint(write(tmp_path, tiny_config(attention_bias=True), kind=kind))
    copied = set()
    for name, info in checkpoint.parameters.items():
        if (extent := checkpoint.extent(name)) is not None:
            copied.add(name.rpartition("blk.0.")[2])
            data = extent.path.read_bytes()[extent.offset :][: info.num_bytes]
            read = checkpoint.read(name, 0, info.shape[0])
            assert data == read.view(torch.uint8).numpy().tobytes()
    assert {"attn_norm.weight", "attn_v.bias"} <= copied
    assert ("ffn_down.weight" in copied) == (kind == "BF16")
    assert not copied & {"attn_q.weight", "attn_k.weight", "attn_q.bias"}


def test_exported_gguf_gives_the_same_logits(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    path = write(tmp_path, config)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.tie_word_embeddings
    export_hf(checkpoint, tmp_path / "hf")
    tokens = torch.arange(20)[None]
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(tokens).logits
    judge = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)(tokens).logits
    torch.testing.assert_close(ours, judge, atol=1e-5, rtol=1e-5)
    assert open_checkpoint(tmp_path / "hf").config.rms_norm_eps == config["rms_norm_eps"]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recovered_from_its_factors(tmp_path: Path, factor: float) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = tiny_config(head_dim=64, rope_theta=500000.0, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config | {"rope_scaling": scaling}))
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    path = write(tmp_path, config, rope_freqs=(plain / scaled).tolist())
    assert open_checkpoint(path).config.rope == RopeConfig(
        rope_type="llama3",
        theta=500000.0,
        factor=factor,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    path = write(tmp_path, config, rope_freqs=(plain / scaled * 1.1).tolist())
    assert "is not the llama3 scaling" in refusal(path, UnsupportedModelError)
    path = write(tmp_path, config, rope_freqs=[1.0] * 32)
    assert open_checkpoint(path).config.rope == RopeConfig(theta=500000.0)


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({}, RopeConfig()),
        ({"llama.rope.scaling.type": "none"}, RopeConfig()),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            RopeConfig(rope_type="linear", factor=4.0),
        ),
        ({"llama.rope.scale_linear": 4.0}, RopeConfig(rope_type="linear", factor=4.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
                "llama.rope.scaling.finetuned": True,
            },
            RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
        ),
    ],
)
def test_rope_scaling_of_the_metadata(
    tmp_path: Path, metadata: dict[str, Any], rope: RopeConfig
) -> None:
    assert open_checkpoint(write(tmp_path, metadata=metadata)).config.rope == rope


@pytest.mark.parametrize(
    ("metadata", "error", "named"),
    [
        ({"llama.expert_count": 8}, UnsupportedModelError, "llama.expert_count = 8"),
        ({"llama.logit_scale": 0.5}, UnsupportedModelError, "llama.logit_scale = 0.5"),
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedModelError, "'longrope'"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 0.5},
            UnsupportedModelError,
            "attn_factor = 0.5",
        ),
        ({"llama.rope.dimension_count": 8}, UnsupportedModelError, "head sizes that differ"),
        ({"llama.attention.head_count_kv": 3}, UnsupportedModelError, "must divide"),
        ({"llama.vocab_size": 300}, CheckpointError, "llama.vocab_size = 300"),
        ({"llama.block_count": 3}, WeightMapError, "model.layers.2.mlp.up_proj.weight"),
        ({"llama.block_count": 1}, WeightMapError, "blk.1.ffn_up.weight"),
        ({"llama.embedding_length": 64}, WeightMapError, "expected [256, 64]"),
        ({"split.count": 2}, CheckpointError, "part of 2 files"),
        ({"tokenizer.ggml.pre": "default"}, CheckpointError, "pre = 'default', supported are"),
        ({"tokenizer.ggml.model": "bert"}, CheckpointError, "model = 'bert'"),
        ({"tokenizer.ggml.tokens": ...}, CheckpointError, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["q q"]}, CheckpointError, "1 of 1 merges"),
        ({"tokenizer.ggml.bos_token_id": ...}, CheckpointError, "adds bos"),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, metadata: dict[str, Any], error: type[SharkError], named: str
) -> None:
    assert named in refusal(write(tmp_path, metadata=metadata), error)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "gemma.gguf"
    writer = gguf.GGUFWriter(path, "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "general.architecture = 'gemma'" in refusal(path, UnsupportedModelError)


def test_unsupported_kinds_are_refused_by_name(tmp_path: Path) -> None:
    blocks = np.zeros((128, 136), dtype=np.uint8)
    path = write(tmp_path, raw={"blk.0.ffn_down.weight": (blocks, "IQ4_XS")})
    assert "blk.0.ffn_down.weight (IQ4_XS)" in refusal(path)


@pytest.mark.parametrize("size", [0, 3, 4, 12, 24, 1000, 20_000, -1, "+64"])
def test_cut_or_lengthened_file_is_refused(tmp_path: Path, size: int | str) -> None:
    """A17"""
    path = write(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * 64 if size == "+64" else content[: int(size)])
    refusal(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A17"""
    path = tmp_path / "x.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS pointer" in refusal(path)
    path.write_bytes(b"GGML" + bytes(100))
    assert "no GGUF file" in refusal(path)
    path.write_bytes(b"GGUF\x01\0\0\0" + bytes(100))
    assert "GGUF version 1" in refusal(path)


def test_eos_ids_are_united(tmp_path: Path) -> None:
    """A11"""
    metadata = {"tokenizer.ggml.eot_token_id": 4, "tokenizer.ggml.eom_token_id": 2}
    checkpoint = open_checkpoint(write(tmp_path, metadata=metadata))
    assert checkpoint.config.eos_token_ids == (2, 4)
    generation = json.loads(checkpoint.aux_files["generation_config.json"])
    assert generation["eos_token_id"] == [2, 4]


def test_digest_depends_on_content_only(tmp_path: Path) -> None:
    path = write(tmp_path)
    digest = open_checkpoint(path).digest()
    renamed = path.rename(tmp_path / "other.gguf")
    assert open_checkpoint(tmp_path).digest() == digest
    content = bytearray(renamed.read_bytes())
    content[-1] ^= 1
    renamed.write_bytes(content)
    assert open_checkpoint(renamed).digest() != digest


def test_the_real_model(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (576, 64, 49152)
    assert (config.rope.theta, config.rms_norm_eps) == (100000.0, 1e-05)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert len(checkpoint.parameters) == 30 * 9 + 2
    rows = checkpoint.read("token_embd.weight", 0, 100)
    assert 0.01 < rows.std() < 1
    assert math.isfinite(rows.sum())
