"""FP8 checkpoints: matrices of 8-bit floats with scales beside them, multiplied out when read.

    weight[r, c] = float32(F8_E4M3[r, c]) * float32(scale[r // block rows, c // block columns])

R x C is the matrix, b0 x b1 a block of it:

    quant_method         the scale's name    its shape
    fp8                  weight_scale_inv    (ceil(R / b0), ceil(C / b1))
                         weight_scale        () or (1,)
    fbgemm_fp8           weight_scale        (R, 1)
    compressed-tensors   weight_scale        (), (1,), (R, 1) or blocks

Sources: transformers, integrations/finegrained_fp8.py (Fp8Dequantize) and fbgemm_fp8.py; vLLM,
quantization/fp8.py; compressed_tensors, quantization/lifecycle/forward.py (dequantize).

`weight_scale_inv` is what the weight is multiplied with, whatever its name says. Which matrices are
quantized is told by their own dtype; each of them has a scale, and each scale its matrix.
Activations are not rounded to 8 bits here, and neither is the KV cache: their scales have no use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from shark_llm.checkpoint.safetensors_file import TensorLocation
from shark_llm.errors import CheckpointError, UnsupportedModelError

FP8 = "FP8"
"""What users call these checkpoints."""
QUANTIZED_DTYPE = "F8_E4M3"
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_SCALE_SUFFIXES = ("_scale_inv", "_scale")  # behind the name of the matrix
_UNUSED = re.compile(r".+\.(input_scale|output_scale|k_scale|v_scale|q_scale|activation_scale)")


@dataclass(frozen=True, kw_only=True)
class Fp8Scheme:
    """What config.json says of the scales. `block` None: one scale a matrix, or one a row."""

    method: str
    block: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A quantized matrix with its scale."""

    weight: TensorLocation
    scale: TensorLocation
    block: tuple[int, int]
    """Rows and columns that share a scale."""


def read_scheme(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], Fp8Scheme | None]:
    """config.json without its FP8 quantization, and that. Raises UnsupportedModelError for a
    quantization that says FP8 and is of a form that is not described above; leaves others in
    place for `config_from_hf` to refuse."""
    plain = dict(hf_config)
    for key in _QUANTIZATION_KEYS:
        said = hf_config.get(key)
        if not isinstance(said, Mapping):
            continue
        method = said.get("quant_method")
        if method == "fp8":
            block = said.get("weight_block_size")
            scheme = Fp8Scheme(method="fp8", block=None if block is None else _block(key, block))
        elif method == "fbgemm_fp8":
            scheme = Fp8Scheme(method="fbgemm_fp8", block=None)
        elif method == "compressed-tensors":
            scheme = _compressed_tensors(key, said)
        else:
            continue
        del plain[key]
        return plain, scheme
    return plain, None


def _compressed_tensors(key: str, said: Mapping[str, Any]) -> Fp8Scheme:
    groups = said.get("config_groups")
    weights = [
        group.get("weights") if isinstance(group, Mapping) else None
        for group in (groups.values() if isinstance(groups, Mapping) else ())
    ]
    if not weights or said.get("format") not in ("float-quantized", "naive-quantized"):
        _refuse(key, f"format {said.get('format')!r}")
    for other in ("sparsity_config", "transform_config"):
        if said.get(other) not in (None, {}, {"format": "dense"}):
            _refuse(key, f"{other} {said[other]!r}")
    blocks = set()
    for each in weights:
        if not isinstance(each, Mapping) or (each.get("type"), each.get("num_bits")) != (
            "float",
            8,
        ):
            _refuse(key, f"weights {each!r}")
        if each.get("symmetric") is False or each.get("dynamic") not in (None, False):
            _refuse(key, "weights with zero points or dynamic scales")
        strategy = each.get("strategy")
        if strategy not in ("tensor", "channel", "block"):
            _refuse(key, f"strategy {strategy!r}")
        blocks.add(_block(key, each.get("block_structure")) if strategy == "block" else None)
    if len(blocks) > 1:
        _refuse(key, "groups of different blocks")
    return Fp8Scheme(method="compressed-tensors", block=blocks.pop())


def _block(key: str, value: Any) -> tuple[int, int]:
    sizes = value.split("x") if isinstance(value, str) else value  # "128x128" in older files
    try:
        rows, columns = (int(size) for size in sizes)
    except (TypeError, ValueError):
        _refuse(key, f"block {value!r}")
    if rows < 1 or columns < 1:
        _refuse(key, f"block {value!r}")
    return rows, columns


def _refuse(key: str, what: str) -> NoReturn:
    raise UnsupportedModelError(
        f"config.json: {key}: {what} is not read: FP8 weights (E4M3) with a scale for each matrix, "
        "row or block are; use those, or the unquantized model"
    )


def take_scales(
    directory: str, tensors: Mapping[str, TensorLocation], scheme: Fp8Scheme
) -> tuple[dict[str, TensorLocation], dict[str, Scaled], tuple[str, ...]]:
    """Split the tensors of a file into those that are no scales, the quantized ones by name with
    their scales, and notes. Raises CheckpointError naming scales and matrices without each other,
    and scales that do not fit their matrix."""
    scaled: dict[str, Scaled] = {}
    used: set[str] = set()
    lonely: list[str] = []
    for name, location in tensors.items():
        if location.dtype != QUANTIZED_DTYPE:
            continue
        found = [name + suffix for suffix in _SCALE_SUFFIXES if name + suffix in tensors]
        if len(found) != 1 or not name.endswith(".weight"):
            lonely.append(name)
            continue
        scale = tensors[found[0]]
        block = _scale_block(directory, name, location, found[0], scale, scheme)
        scaled[name] = Scaled(weight=location, scale=scale, block=block)
        used.add(found[0])
    unused = [name for name in tensors if _UNUSED.fullmatch(name)]
    rest = {n: t for n, t in tensors.items() if n not in used and n not in unused}
    lonely += [name for name in rest if name.endswith(_SCALE_SUFFIXES)]
    if lonely:
        raise CheckpointError(
            f"{directory}: {len(lonely)} FP8 matrices and scales without each other:"
            f" {', '.join(sorted(lonely))}; download the model again, or use the unquantized one"
        )
    notes = [f"{len(scaled)} FP8 matrices ({scheme.method}) are multiplied out when read"]
    if unused:
        notes.append(
            f"{len(unused)} scales of activations and KV cache have no use: neither is rounded to"
            " 8 bits here"
        )
    return rest, scaled, tuple(notes)


def _scale_block(
    directory: str,
    name: str,
    weight: TensorLocation,
    scale_name: str,
    scale: TensorLocation,
    scheme: Fp8Scheme,
) -> tuple[int, int]:
    """Rows and columns that share a scale, from the shapes; those of blocks from the config."""
    fits = len(weight.shape) == 2 and scale.dtype in ("F32", "BF16", "F16")
    rows, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
    if fits and scale.shape in ((), (1,), (1, 1)):
        return rows, columns
    if fits and scheme.block is None and scale.shape in ((rows, 1), (rows,)):
        return 1, columns
    if fits and scheme.block is not None:
        tall, wide = scheme.block
        if scale.shape == (-(-rows // tall), -(-columns // wide)):
            return tall, wide
    block = "" if scheme.block is None else f", blocks of {scheme.block[0]} x {scheme.block[1]}"
    raise CheckpointError(
        f"{directory}: {scale_name} ({scale.dtype} {list(scale.shape)}) is no scale of {name}"
        f" {list(weight.shape)}{block}: download the model again, or use the unquantized one"
    )


def dequantize(
    rows: torch.Tensor, scale: torch.Tensor, *, start: int, block: tuple[int, int]
) -> torch.Tensor:
    """Rows `start` ... of a matrix as f32, from their F8_E4M3 bits.

    rows (N, C) uint8, scale of the whole matrix in any shape that `Scaled` has.
    """
    count, columns = rows.shape
    tall, wide = block
    values = rows.view(torch.float8_e4m3fn).to(torch.float32)  # (N, C)
    grid = scale.to(torch.float32).reshape(-1, -(-columns // wide))  # (ceil(R/b0), ceil(C/b1))
    of_row = torch.arange(start, start + count) // tall  # (N,)
    if wide == columns:
        return values.mul_(grid[of_row])
    of_column = torch.arange(columns) // wide  # (C,)
    return values.mul_(grid[of_row][:, of_column])
