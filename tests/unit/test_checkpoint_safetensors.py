"""A Hugging Face directory is read lazily, wholly, and only when it is sound."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shark_llm.checkpoint.names import expected_parameters, from_hf_name, to_hf_name
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.checkpoint.source import Checkpoint, iter_row_blocks
from shark_llm.errors import CheckpointError, SharkError, WeightMapError
from shark_llm.model.config import config_from_hf
from tiny import tiny_config, tiny_weights, write_json, write_tiny, write_tiny_weights

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def refusal(directory: Path, error: type[SharkError] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat(list(iter_row_blocks(checkpoint, name, max_bytes=1000)))
        for name in checkpoint.parameters
    }


def assert_reads(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    """Every parameter equals the tensor that was written, dtype and all."""
    read = read_all(open_checkpoint(directory))
    assert {to_hf_name(name) for name in read} == set(weights)
    for name, tensor in read.items():
        expected = weights[to_hf_name(name)]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_values_read_equal(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    weights = tiny_weights(tiny_config(), dtype=dtype)
    assert_reads(write_tiny(tmp_path, dtype=dtype, shards=shards), weights)


def test_any_rows_can_be_read_alone(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path))
    whole = checkpoint.read("blk.1.ffn_down.weight", 0, 64)
    for start, stop in [(0, 0), (0, 1), (5, 9), (63, 64), (64, 64)]:
        rows = checkpoint.read("blk.1.ffn_down.weight", start, stop)
        assert rows.shape == (stop - start, 128)
        assert torch.equal(rows, whole[start:stop])
    rows = checkpoint.read("output_norm.weight", 3, 5)
    rows.zero_()  # the memory is the caller's own
    assert checkpoint.read("output_norm.weight", 3, 5).abs().min() > 0


def test_names_map_both_ways() -> None:
    hf = tiny_config(attention_bias=True, mlp_bias=True)
    shapes = expected_parameters(config_from_hf(hf))
    weights = tiny_weights(hf)
    assert {to_hf_name(name): shape for name, shape in shapes.items()} == {
        name: tuple(tensor.shape) for name, tensor in weights.items()
    }
    assert [from_hf_name(to_hf_name(name)) for name in shapes] == list(shapes)
    assert from_hf_name("model.layers.0.self_attn.qkv_proj.weight") is None


def test_tied_without_head(tmp_path: Path) -> None:
    """A01"""
    config = tiny_config(tie_word_embeddings=True)
    checkpoint = open_checkpoint(write_tiny(tmp_path, config=config, shards=2))
    assert checkpoint.config.tie_word_embeddings
    assert "output.weight" not in checkpoint.parameters


def test_tied_with_an_equal_head_that_only_the_index_leaves_out(tmp_path: Path) -> None:
    """A01, A02 (i)"""
    config = tiny_config(tie_word_embeddings=True)
    weights = tiny_weights(config)
    weights[HEAD] = weights[EMBEDDING].clone()
    write_tiny(tmp_path, config=config, weights=weights, shards=2)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    del index["weight_map"][HEAD]
    write_json(index_path, index)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.tie_word_embeddings
    assert "output.weight" not in checkpoint.parameters
    assert any(HEAD in note for note in checkpoint.notes)


@pytest.mark.parametrize("change", ["differs", "only"])
def test_tied_with_another_head_is_read_as_transformers_reads_it(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A02 (ii): both kept and said; and a head that stands alone serves as the embedding too."""
    config = tiny_config(tie_word_embeddings=True)
    weights = tiny_weights(config)
    weights[HEAD] = tiny_weights(tiny_config(), seed=1)[HEAD]
    if change == "only":
        del weights[EMBEDDING]
    checkpoint = open_checkpoint(write_tiny(tmp_path, config=config, weights=weights))
    assert checkpoint.config.tie_word_embeddings == (change == "only")
    assert any(HEAD in note for note in checkpoint.notes)

    caplog.set_level(logging.ERROR)
    judge = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    read = read_all(checkpoint)
    assert torch.equal(read["token_embd.weight"], judge[EMBEDDING])
    assert torch.equal(read.get("output.weight", read["token_embd.weight"]), judge[HEAD])


def test_untied_without_head_is_refused(tmp_path: Path) -> None:
    """A03"""
    weights = tiny_weights(tiny_config())
    del weights[HEAD]
    message = refusal(write_tiny(tmp_path, weights=weights), WeightMapError)
    assert HEAD in message
    assert "tie_word_embeddings" in message


def test_head_dim_beside_hidden_over_heads(tmp_path: Path) -> None:
    """A05"""
    config = tiny_config(hidden_size=160, head_dim=64)
    assert_reads(write_tiny(tmp_path, config=config), tiny_weights(config))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.parameters["blk.0.attn_q.weight"].shape == (256, 160)
    assert checkpoint.parameters["blk.0.attn_output.weight"].shape == (160, 256)


@pytest.mark.parametrize("layout", ["int", "list", "absent"])
def test_eos_ids_of_all_files_are_united(tmp_path: Path, layout: str) -> None:
    """A11: config 2, generation_config [3, 4], tokenizer 5 (<|end|>)"""
    generation = {"int": {"eos_token_id": 3}, "list": {"eos_token_id": [3, 4]}, "absent": None}
    write_tiny(tmp_path, generation_config=generation[layout], eos_token="<|end|>")
    expected = {"int": (2, 3, 5), "list": (2, 3, 4, 5), "absent": (2, 5)}
    assert open_checkpoint(tmp_path).config.eos_token_ids == expected[layout]


def test_eos_token_as_an_object(tmp_path: Path) -> None:
    """A11"""
    write_tiny(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    tokenizer_config = json.loads(path.read_text())
    write_json(path, tokenizer_config | {"eos_token": {"content": "<|im_end|>"}})
    assert open_checkpoint(tmp_path).config.eos_token_ids == (2, 4)
    write_json(path, tokenizer_config | {"eos_token": "<|gone|>"})
    assert "'<|gone|>' is no token" in refusal(tmp_path)


def test_all_biases_are_read(tmp_path: Path) -> None:
    """A12"""
    config = tiny_config(attention_bias=True, mlp_bias=True)
    weights = tiny_weights(config)
    assert sum(name.endswith(".bias") for name in weights) == 2 * 7
    assert_reads(write_tiny(tmp_path, config=config), weights)


def test_biases_without_their_flag_are_refused(tmp_path: Path) -> None:
    """A12"""
    weights = tiny_weights(tiny_config(attention_bias=True))
    message = refusal(write_tiny(tmp_path, weights=weights), WeightMapError)
    assert "model.layers.1.self_attn.o_proj.bias" in message
    assert "attention_bias = False" in message


def test_stored_angles_are_ignored_and_others_refused(tmp_path: Path) -> None:
    """A13"""
    weights = tiny_weights(tiny_config())
    angles = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.full((8,), 7.0)
        for layer in range(2)
    }
    directory = write_tiny(tmp_path, weights=weights | angles)
    assert_reads(directory, weights)
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(16), "foo": torch.ones(1)}
    write_tiny_weights(directory, weights | extra)
    message = refusal(directory, WeightMapError)
    assert all(name in message for name in extra)


def test_scales_of_an_fp8_kv_cache_are_ignored(tmp_path: Path) -> None:
    """B12: in any of the places where quantizers put them; the cache is never fp8."""
    weights = tiny_weights(tiny_config())
    scales = {
        f"model.layers.{layer}.self_attn.{place}": torch.tensor(0.05)
        for layer in range(2)
        for place in ("k_scale", "v_scale", "attn.k_scale", "k_proj.k_scale", "v_proj.v_scale")
    }
    directory = write_tiny(tmp_path, weights=weights | scales)
    assert_reads(directory, weights)
    of_a_weight = {"model.layers.0.mlp.up_proj.weight_scale": torch.tensor(0.05)}
    write_tiny_weights(directory, weights | of_a_weight)
    assert "weight_scale" in refusal(directory, WeightMapError)


def test_only_files_of_the_index_count(tmp_path: Path) -> None:
    """A14"""
    directory = write_tiny(tmp_path / "a", shards=2)
    other = write_tiny(tmp_path / "b", shards=2)
    assert open_checkpoint(other).digest() == open_checkpoint(directory).digest()
    strays = ("consolidated.safetensors", "adapter.safetensors", "model.safetensors")
    for stray in strays:
        save_file(tiny_weights(tiny_config(), seed=9), directory / stray)
    assert_reads(directory, tiny_weights(tiny_config()))
    checkpoint = open_checkpoint(directory)
    assert checkpoint.digest() == open_checkpoint(other).digest()
    assert any("model.safetensors is not read" in note for note in checkpoint.notes)


def test_shards_may_have_any_name(tmp_path: Path) -> None:
    """A14"""
    directory = write_tiny(tmp_path, shards=2)
    index_path = directory / "model.safetensors.index.json"
    text = index_path.read_text()
    for shard in sorted(directory.glob("model-*.safetensors")):
        new_name = shard.name.replace("model-", "weights_")
        shard.rename(directory / new_name)
        text = text.replace(shard.name, new_name)
    index_path.write_text(text)
    assert_reads(directory, tiny_weights(tiny_config()))


@pytest.mark.parametrize("name", ["/etc/passwd", "../model.safetensors", "", 3])
def test_index_stays_in_its_directory(tmp_path: Path, name: Any) -> None:
    directory = write_tiny(tmp_path, shards=2)
    write_json(directory / "model.safetensors.index.json", {"weight_map": {HEAD: name}})
    assert "outside its directory" in refusal(directory)


def test_missing_shard_is_refused(tmp_path: Path) -> None:
    """A16 (i)"""
    directory = write_tiny(tmp_path, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    message = refusal(directory)
    assert "1 of 3" in message
    assert "model-00002-of-00003.safetensors" in message


def test_index_that_names_what_is_not_there_is_refused(tmp_path: Path) -> None:
    """A16 (ii)"""
    directory = write_tiny(tmp_path, shards=2)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= {"model.norm.weight": index["weight_map"][EMBEDDING], "ghost": "x"}
    index["weight_map"]["ghost"] = index["weight_map"][EMBEDDING]
    write_json(path, index)
    message = refusal(directory)
    assert "model.norm.weight" in message
    assert "ghost" in message


def test_missing_layer_is_refused_with_all_names(tmp_path: Path) -> None:
    """A16 (iii)"""
    weights = tiny_weights(tiny_config())
    kept = {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}
    message = refusal(write_tiny(tmp_path, weights=kept, shards=2), WeightMapError)
    assert "9 tensors are missing" in message
    assert all(name in message for name in weights if name not in kept)
    assert "num_hidden_layers = 2" in message


def test_surplus_layer_is_refused(tmp_path: Path) -> None:
    """A16: the count of layers against the config"""
    weights = tiny_weights(tiny_config(num_hidden_layers=3))
    message = refusal(write_tiny(tmp_path, weights=weights), WeightMapError)
    assert "model.layers.2.mlp.up_proj.weight" in message
    assert "num_hidden_layers = 2" in message


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, shards=2)
    shard = directory / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    save_file(tensors | {EMBEDDING: torch.zeros(256, 64)}, shard)
    assert f"{EMBEDDING} stands in model-00001" in refusal(directory)


def header_end(path: Path) -> int:
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


@pytest.mark.parametrize("size", ["0", "4", "8", "100", "header", "-1", "+1"])
def test_cut_or_lengthened_file_is_refused(tmp_path: Path, size: str) -> None:
    """A17"""
    path = write_tiny(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    end = {"header": header_end(path), "-1": len(content) - 1}.get(size)
    if size == "+1":
        path.write_bytes(content + b"\0")
    else:
        path.write_bytes(content[: int(size) if end is None else end])
    message = refusal(tmp_path)
    assert "model.safetensors" in message
    assert any(character.isdigit() for character in message)


def test_lfs_pointer_is_named_as_such(tmp_path: Path) -> None:
    """A17"""
    path = write_tiny(tmp_path) / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n")
    assert "Git LFS pointer" in refusal(tmp_path)


@pytest.mark.parametrize("header_bytes", [99_993, 100_000, 100_001])
def test_long_headers_are_read(tmp_path: Path, header_bytes: int) -> None:
    """A17"""
    path = write_tiny(tmp_path) / "model.safetensors"
    content, end = path.read_bytes(), header_end(path)
    header = content[8:end].rstrip(b" ").ljust(header_bytes)
    path.write_bytes(struct.pack("<Q", header_bytes) + header + content[end:])
    assert_reads(tmp_path, tiny_weights(tiny_config()))


def rewrite_header(path: Path, name: str, **entry: Any) -> None:
    content, end = path.read_bytes(), header_end(path)
    header = json.loads(content[8:end])
    header[name] |= entry
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[end:])


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0, 4]},
        {"data_offsets": [4, 0]},
        {"data_offsets": [0, 2**40]},
        {"data_offsets": [-4, 0]},
        {"data_offsets": [0]},
        {"data_offsets": None},
        {"shape": [-1, 64]},
        {"shape": [2**40, 64]},
        {"shape": "64"},
        {"dtype": "F33"},
        {"dtype": None},
    ],
)
def test_wrong_header_entry_is_refused_by_name(tmp_path: Path, entry: dict[str, Any]) -> None:
    """A19"""
    path = write_tiny(tmp_path) / "model.safetensors"
    rewrite_header(path, HEAD, **entry)
    message = refusal(tmp_path)
    assert HEAD in message
    assert str(path) in message


@pytest.mark.parametrize("shift", [-4, 4])
def test_overlaps_and_gaps_are_refused(tmp_path: Path, shift: int) -> None:
    """A19"""
    path = write_tiny(tmp_path) / "model.safetensors"
    header = json.loads(path.read_bytes()[8 : header_end(path)])
    begin, end = header["model.norm.weight"]["data_offsets"]
    rewrite_header(path, "model.norm.weight", data_offsets=[begin + shift, end + shift])
    assert ("overlaps" if shift < 0 else "gap") in refusal(tmp_path)


def test_header_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path) / "model.safetensors"
    content, end = path.read_bytes(), header_end(path)
    header = content[8:end].rstrip(b" }").rstrip() + b'},"lm_head.weight":{}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[end:])
    assert "stands twice in one object: lm_head.weight" in refusal(tmp_path)


def test_vocab_size_that_is_not_the_matrix_is_refused(tmp_path: Path) -> None:
    """A20"""
    config = tiny_config(vocab_size=255)
    message = refusal(
        write_tiny(tmp_path, config=config, weights=tiny_weights(tiny_config())), WeightMapError
    )
    assert f"{EMBEDDING} is [256, 64], expected [255, 64]" in message
    assert f"{HEAD} is [256, 64], expected [255, 64]" in message


@pytest.mark.parametrize("tokens", [200, 260])
def test_tokenizer_of_another_size_is_read(tmp_path: Path, tokens: int) -> None:
    """A20: the tokenizer may be smaller or larger than the embedding."""
    write_tiny(tmp_path, tokenizer_vocab_size=tokens)
    vocab = json.loads(open_checkpoint(tmp_path).aux_files["tokenizer.json"])["model"]["vocab"]
    assert len(vocab) == tokens


@pytest.mark.parametrize("says", ["dtype", "torch_dtype", None, "lie"])
def test_the_tensors_own_dtype_counts(tmp_path: Path, says: str | None) -> None:
    """A27"""
    key = "torch_dtype" if says in (None, "lie") else says
    value = {"lie": "float32", None: None}.get(says, "bfloat16")
    config = tiny_config(torch_dtype=...) | {key: value}
    write_tiny(tmp_path, config=config, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path)
    assert {info.dtype for info in checkpoint.parameters.values()} == {torch.bfloat16}
    expected = "config.json says dtype float32, but the tensors are bfloat16"
    assert [note[: len(expected)] for note in checkpoint.notes] == [expected] * (says == "lie")


def test_quantized_tensors_are_refused_by_name(tmp_path: Path) -> None:
    """Cases G, an FP8 checkpoint whose config does not say so"""
    weights: dict[str, torch.Tensor] = tiny_weights(tiny_config())
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    assert f"{name} (F8_E4M3)" in refusal(write_tiny(tmp_path, weights=weights))
    weights[name] = weights[name].float()
    weights[f"{name}_scale"] = torch.ones(1)
    message = refusal(write_tiny(tmp_path, weights=weights), WeightMapError)
    assert f"{name}_scale" in message
    assert "quantized" in message


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"a": 1, "a": 1}', b"null"])
def test_broken_config_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (write_tiny(tmp_path) / "config.json").write_bytes(content)
    assert "config.json" in refusal(tmp_path)


def test_digest_depends_on_weights_only(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "a")
    digest = open_checkpoint(directory).digest()
    assert len(digest) == 64
    moved = shutil.move(directory, tmp_path / "b")
    (moved / "tokenizer_config.json").unlink()
    assert open_checkpoint(moved).digest() == digest
    path = moved / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert open_checkpoint(moved).digest() != digest


def test_file_that_shrinks_while_read_is_an_error(tmp_path: Path) -> None:
    path = write_tiny(tmp_path) / "model.safetensors"
    checkpoint = open_checkpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="has 2000 bytes, expected"):
        read_all(checkpoint)
