"""Which reader a path gets, and what is said when there is nothing to read."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shark_llm.checkpoint.export_hf import export_hf
from shark_llm.checkpoint.names import expected_parameters, to_hf_name
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.errors import CheckpointError
from shark_llm.model.config import config_from_hf
from tiny import tiny_config, tiny_weights, write_json, write_tiny


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "holds no weights: expected model.safetensors"),
        (["consolidated.safetensors"], "the Hugging Face layout is needed"),  # A14
        (["consolidated.00.pth"], "convert them to safetensors"),
        (["pytorch_model.bin"], "convert them to safetensors"),
        (["adapter_model.safetensors"], "complete the download"),
        (["a.gguf", "b.gguf"], "several models: a.gguf, b.gguf"),
    ],
)
def test_nothing_to_read(tmp_path: Path, files: list[str], expected: str) -> None:
    write_json(tmp_path / "config.json", tiny_config())
    for name in files:
        (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(tmp_path)


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory"):
        open_checkpoint(tmp_path / "gone")


def test_no_config(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)


def test_a_weight_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with pytest.raises(CheckpointError, match="name its directory"):
        open_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="name a directory with weights"):
        open_checkpoint(tmp_path / "config.json")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(CheckpointError, match=r"name a \.gguf file"):
        open_checkpoint(tmp_path / "weights.bin")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [5 << 30, 50_000])
def test_export_is_the_same_model(tmp_path: Path, tied: bool, max_shard_bytes: int) -> None:
    config = tiny_config(tie_word_embeddings=tied, attention_bias=True)
    checkpoint = open_checkpoint(write_tiny(tmp_path / "in", config=config))
    export_hf(checkpoint, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes < 1e9)
    written = open_checkpoint(tmp_path / "out")
    assert written.config == checkpoint.config
    assert written.notes == ()
    judge = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in tiny_weights(config).items():
        assert torch.equal(judge[name], tensor), name
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()


def test_export_in_another_dtype(tmp_path: Path) -> None:
    export_hf(open_checkpoint(write_tiny(tmp_path / "in")), tmp_path / "out", dtype=torch.bfloat16)
    written = open_checkpoint(tmp_path / "out")
    assert written.config.torch_dtype == "bfloat16"
    expected = tiny_weights(tiny_config())["lm_head.weight"].bfloat16()
    assert torch.equal(written.read("output.weight", 0, 256), expected)


def test_export_unties_what_the_weights_untie(tmp_path: Path) -> None:
    """A02 (ii)"""
    config = tiny_config(tie_word_embeddings=True)
    weights = tiny_weights(tiny_config())
    checkpoint = open_checkpoint(write_tiny(tmp_path / "in", config=config, weights=weights))
    export_hf(checkpoint, tmp_path / "out")
    written = open_checkpoint(tmp_path / "out")
    assert not written.config.tie_word_embeddings
    assert written.notes == ()


def test_symlinked_shards_are_read(tmp_path: Path) -> None:
    """A hub snapshot: every file is a link to a blob elsewhere."""
    blobs = write_tiny(tmp_path / "blobs", shards=2)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    assert open_checkpoint(snapshot).digest() == open_checkpoint(blobs).digest()


MEASURE = """
import resource, sys
from pathlib import Path
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.checkpoint.source import iter_row_blocks
checkpoint = open_checkpoint(Path(sys.argv[1]))
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before, read = peak(), 0
for name in checkpoint.parameters:
    for block in iter_row_blocks(checkpoint, name, max_bytes=64 << 20):
        read += block.numel() * block.element_size()
print(peak() - before, read >> 20)
"""


@pytest.mark.parametrize(
    ("layers", "min_mib"), [(1, 2000), pytest.param(32, 15000, marks=pytest.mark.long)]
)
def test_peak_memory_of_a_whole_read(tmp_path: Path, layers: int, min_mib: int) -> None:
    """Issue 2, line 6: an 8B-shaped checkpoint (sparse file) passes in blocks of 64 MiB."""
    config = tiny_config(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        torch_dtype="bfloat16",
    )
    write_sparse(tmp_path, config)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    growth, read = map(int, result.stdout.split())
    assert read >= min_mib
    assert growth < 256, f"peak memory grew by {growth} MiB while {read} MiB were read"


def write_sparse(directory: Path, config: dict[str, object]) -> None:
    """A checkpoint of zeros of any size, which takes no room on the disk."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in expected_parameters(config_from_hf(config)).items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        entry = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        header[to_hf_name(name)] = entry
    encoded = json.dumps(header).encode()
    write_json(directory / "config.json", config)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
