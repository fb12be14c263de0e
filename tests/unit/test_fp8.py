"""FP8 checkpoints are read as the libraries that made them do, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from build_harness import FakeCompileSide, ListReporter, settings
from shark_llm.build import build
from shark_llm.checkpoint.config_only import ConfigOnlyCheckpoint
from shark_llm.checkpoint.names import to_hf_name
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.errors import CheckpointError, SharkError, UnsupportedModelError
from tiny import tiny_config, tiny_weights, write_tiny

MAX = 448.0  # of E4M3
BLOCK = (24, 40)  # divides neither side of most matrices
LINEAR = ("_proj.weight",)


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    group = {"targets": ["Linear"], "weights": scheme | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


SCHEMES: dict[str, tuple[dict[str, Any], str, tuple[int, int] | None, str]] = {
    # quantization_config, suffix of the scale, block (None: all; 0: all columns), scale's dtype
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCK)}, "_scale_inv", BLOCK, "float32",
    ),
    "fp8 tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"}, "_scale", None, "float32",
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "_scale", (1, 0), "float32"),
    "compressed tensor": (compressed("tensor"), "_scale", None, "bfloat16"),
    "compressed channel": (compressed("channel"), "_scale", (1, 0), "bfloat16"),
    "compressed blocks": (
        compressed("block", block_structure=list(BLOCK)), "_scale", BLOCK, "bfloat16",
    ),
    "compressed blocks, older": (
        compressed("block", block_structure="24x40"), "_scale", BLOCK, "float16",
    ),
}  # fmt: skip


def quantize(
    weight: torch.Tensor, block: tuple[int, int] | None, dtype: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """E4M3 values, their scales, and what they stand for in f32: written out block by block."""
    rows, columns = weight.shape
    tall, wide = block or (rows, columns)
    wide = wide or columns
    grid = torch.empty(-(-rows // tall), -(-columns // wide), dtype=getattr(torch, dtype))
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    expected = torch.empty_like(weight)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            at = (slice(i * tall, (i + 1) * tall), slice(j * wide, (j + 1) * wide))
            grid[i, j] = weight[at].abs().max() / MAX
            values[at] = (weight[at] / grid[i, j].float()).to(torch.float8_e4m3fn)
            expected[at] = values[at].float() * grid[i, j].float()
    return values, grid.reshape(1) if block is None else grid, expected


def write_fp8(directory: Path, scheme: str, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tiny checkpoint in that scheme; returns what its weights stand for."""
    quantization, suffix, block, dtype = SCHEMES[scheme]
    config = tiny_config(quantization_config=quantization, torch_dtype="bfloat16")
    stored: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, weight in tiny_weights(config).items():
        if name.endswith(LINEAR):
            stored[name], stored[name + suffix], expected[name] = quantize(weight, block, dtype)
        else:
            stored[name] = weight.to(torch.bfloat16)
            expected[name] = stored[name].float()
    write_tiny(directory, config=config, weights=stored | more)
    return expected


@pytest.mark.parametrize("scheme", SCHEMES)
def test_read_as_the_formula_says(tmp_path: Path, scheme: str) -> None:
    """Whole, and in rows that begin and end inside of blocks."""
    expected = write_fp8(tmp_path, scheme)
    checkpoint = open_checkpoint(tmp_path)
    for name, info in checkpoint.parameters.items():
        wanted = expected[to_hf_name(name)]
        whole = checkpoint.read(name, 0, info.shape[0])
        assert whole.dtype == info.dtype
        assert torch.equal(whole.float(), wanted), name
        assert torch.equal(checkpoint.read(name, 5, 31).float(), wanted[5:31]), name
    assert checkpoint.parameters["blk.0.attn_q.weight"].dtype == torch.float32
    assert checkpoint.notes[0].startswith("14 FP8 matrices (")


def test_blocks_as_transformers_multiplies_them_out() -> None:
    """Where its own code can: blocks that divide the matrix."""
    from shark_llm.checkpoint.fp8 import dequantize

    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    values, grid, _ = quantize(weight, (16, 32), "float32")
    wanted = Fp8Dequantize(None)._dequantize_one(values, grid, torch.float32)
    found = dequantize(values.view(torch.uint8)[7:40], grid, start=7, block=(16, 32))
    assert torch.equal(found, wanted[7:40])


def test_scales_of_activations_are_named_and_not_used(tmp_path: Path) -> None:
    scale = {
        f"model.layers.0.{part}": torch.ones(1)
        for part in ("self_attn.q_proj.input_scale", "self_attn.k_scale", "self_attn.v_scale")
    }
    write_fp8(tmp_path, "fp8 tensor", **scale)
    assert "3 scales of activations and KV cache" in open_checkpoint(tmp_path).notes[1]


def test_the_bundle_is_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its unquantized tensors are, though the others are read as f32; from config alone too."""
    FakeCompileSide.install(monkeypatch)
    write_fp8(tmp_path / "fp8", "fp8 blocks")
    result = build(settings(tmp_path / "fp8", tmp_path / "bundle"), ListReporter())
    assert result.manifest.dtype == "bf16"
    assert ConfigOnlyCheckpoint(tmp_path / "fp8").config.torch_dtype == "bfloat16"


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({NAME: None}, f"without each other: {NAME}_scale"),
        ({f"{NAME}_scale": None}, f"without each other: {NAME}"),
        ({f"{NAME}_scale_inv": torch.ones(1)}, f"without each other: {NAME}"),
        (
            {f"{NAME}_scale": torch.ones(3)},
            "_scale (F32 [3]) is no scale of model.layers.1",
        ),
        ({f"{NAME}_scale": torch.ones(1, dtype=torch.int32)}, "(I32 [1]) is no scale"),
        ({"lm_head.weight": torch.ones(256, 64).to(torch.float8_e5m2)}, "head.weight (F8_E5M2)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: dict[str, torch.Tensor | None], words: str
) -> None:
    write_fp8(tmp_path, "fp8 tensor")
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantization_config = 'awq'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "block [128]"),
        (compressed("tensor") | {"format": "pack-quantized"}, "format 'pack-quantized'"),
        (compressed("tensor", num_bits=4), "'num_bits': 4"),
        (compressed("tensor", type="int"), "'type': 'int'"),
        (compressed("group"), "strategy 'group'"),
        (compressed("tensor", symmetric=False), "zero points"),
        (compressed("tensor") | {"sparsity_config": {"format": "2:4"}}, "sparsity_config"),
        (compressed("tensor") | {"transform_config": {"config_groups": {}}}, "transform_config"),
    ],
)
def test_other_quantizations_are_refused_from_the_config(
    tmp_path: Path, quantization: dict[str, Any], words: str
) -> None:
    write_tiny(tmp_path, config=tiny_config(quantization_config=quantization))
    with pytest.raises(UnsupportedModelError) as caught:
        open_checkpoint(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, SharkError)
