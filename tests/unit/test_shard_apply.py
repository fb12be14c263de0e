"""sharding/apply.py and archives.py: what stands in the archives, and what is refused."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from bundles import model_config
from shark_llm.artifacts.irpa import ArchiveReader, Identity
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.checkpoint.source import ParameterInfo
from shark_llm.errors import CheckpointError, UsageError
from shark_llm.model.config import ModelConfig
from shark_llm.sharding.apply import write_archives
from shark_llm.sharding.archives import archive_sizes, write_dummy_archives
from shark_llm.sharding.plan import parameter_shapes, plan_parameters
from tiny import tiny_config, write_tiny


class CountingCheckpoint:
    """f32 parameters that count upwards; records what is read."""

    notes: tuple[str, ...] = ()
    aux_files: Mapping[str, bytes] = {}

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.tensors = {
            name: torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
            for name, shape in parameter_shapes(config).items()
        }
        self.parameters = {
            name: ParameterInfo(shape=tuple(tensor.shape), dtype=tensor.dtype)
            for name, tensor in self.tensors.items()
        }
        self.reads: list[tuple[str, int, int]] = []

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        self.reads.append((name, start, stop))
        return self.tensors[name][start:stop].clone()

    def extent(self, name: str) -> None:
        """In memory alone."""

    def digest(self, progress: object = None) -> str:
        return "c" * 64


def split(
    config: ModelConfig,
    tp: int,
    out_dir: Path,
    dtype: str = "f32",
    weights_dtype: str | None = None,
) -> list[ArchiveReader]:
    checkpoint = CountingCheckpoint(config)
    identity = Identity(
        model=checkpoint.digest(), tp=tp, rank=None, dtype=dtype, weights_dtype=weights_dtype
    )
    plan = plan_parameters(config, tp, quantized=weights_dtype is not None)
    paths = write_archives(checkpoint, plan, identity=identity, out_dir=out_dir)
    assert len(checkpoint.reads) == len(set(checkpoint.reads)), "every row is read once"
    return [ArchiveReader(path) for path in paths]


def test_files_hold_their_shards_and_say_so(tmp_path: Path) -> None:
    shared, rank_0, rank_1 = split(model_config(), 2, tmp_path)
    assert [a.path.name for a in (shared, rank_0, rank_1)] == [
        "model.irpa",
        "model.rank0.irpa",
        "model.rank1.irpa",
    ]
    assert [a.identity.rank for a in (shared, rank_0, rank_1) if a.identity] == [None, 0, 1]
    assert set(shared.entries) == {
        "output_norm.weight",
        *(f"blk.{i}.{kind}_norm.weight" for i in (0, 1) for kind in ("attn", "ffn")),
    }
    whole = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    down = rank_1.read("blk.0.ffn_down.weight.rank1")
    np.testing.assert_array_equal(down, whole[:, 64:])
    gate = rank_0.read("blk.0.ffn_gate.weight.rank0")
    np.testing.assert_array_equal(gate, whole.reshape(128, 64)[:64])


def test_biases_at_tp2(tmp_path: Path) -> None:
    """B08: column biases are split, row biases are whole on rank 0 and absent elsewhere."""
    config = model_config(attention_bias=True, mlp_bias=True)
    _, rank_0, rank_1 = split(config, 2, tmp_path)
    assert rank_0.entries["blk.0.attn_q.bias.rank0"].shape == (32,)
    assert rank_1.read("blk.0.attn_k.bias.rank1").tolist() == list(range(16, 32))
    assert rank_0.entries["blk.0.ffn_down.bias.rank0"].shape == (64,)
    assert not [name for name in rank_1.entries if "attn_output.bias" in name]


def test_replicated_kv_heads_are_in_both_files(tmp_path: Path) -> None:
    """B01: 4 query and 2 kv heads at tp4."""
    archives = split(model_config(), 4, tmp_path)
    k = [archives[1 + r].read(f"blk.0.attn_k.weight.rank{r}") for r in range(4)]
    np.testing.assert_array_equal(k[0], k[1])
    np.testing.assert_array_equal(k[2], k[3])
    assert k[2][0, 0] == 16 * 64


def test_tp1_is_one_file_with_plain_names(tmp_path: Path) -> None:
    (shared,) = split(model_config(), 1, tmp_path)
    assert list(shared.entries) == list(parameter_shapes(model_config()))


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("weights_dtype", [None, "int8"])
def test_sizes_are_known_beforehand(
    tp: int, dtype: str, weights_dtype: str | None, tmp_path: Path
) -> None:
    config = model_config()
    archives = split(config, tp, tmp_path, dtype, weights_dtype)
    plan = plan_parameters(config, tp, quantized=weights_dtype is not None)
    sizes = archive_sizes(config, plan, tp=tp, dtype=dtype)
    assert sizes == {a.path.name: a.path.stat().st_size for a in archives}


def test_scales_are_of_whole_rows_and_lie_with_them(tmp_path: Path) -> None:
    """Columns of a rank are quantized with the scales of whole rows, which all ranks share; rows
    have theirs beside them."""
    shared, rank_0, rank_1 = split(model_config(), 2, tmp_path, "bf16", "int8")
    down = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    scale = shared.read("blk.0.ffn_down.scale")
    np.testing.assert_allclose(scale, down.max(1) / 127, rtol=1e-6)
    right = rank_1.read("blk.0.ffn_down.weight.rank1")
    assert right.dtype == np.int8
    assert np.abs(right * scale[:, None] - down[:, 64:]).max() <= scale.max() / 2 * 1.001
    gate = down.reshape(128, 64)
    beside = rank_0.read("blk.0.ffn_gate.scale.rank0")
    np.testing.assert_allclose(beside, gate[:64].max(1) / 127, rtol=1e-6)
    assert shared.entries["output_norm.weight"].dtype == "bf16"
    assert "output_norm.scale" not in shared.entries
    assert str(shared.identity).endswith("shared, bf16 with int8 weights")


def test_what_is_not_finite_is_not_quantized(tmp_path: Path) -> None:
    checkpoint = cast_checkpoint(float("inf"))
    plan = plan_parameters(checkpoint.config, 2, quantized=True)
    identity = Identity(model="c" * 64, tp=2, rank=None, dtype="bf16", weights_dtype="int8")
    message = r"blk\.1\.ffn_down\.weight has values that are not finite, which int8 cannot hold"
    with pytest.raises(CheckpointError, match=message):
        write_archives(checkpoint, plan, identity=identity, out_dir=tmp_path)


def cast_checkpoint(value: float) -> CountingCheckpoint:
    checkpoint = CountingCheckpoint(model_config())
    for tensor in checkpoint.tensors.values():
        tensor.fill_(0.5)
    checkpoint.tensors["blk.1.ffn_down.weight"][63, 127] = value
    return checkpoint


def write_f16(checkpoint: CountingCheckpoint, out_dir: Path) -> list[Path]:
    plan = plan_parameters(checkpoint.config, 2)
    identity = Identity(model="c" * 64, tp=2, rank=None, dtype="f16")
    return write_archives(checkpoint, plan, identity=identity, out_dir=out_dir)


@pytest.mark.parametrize("value", [70000.0, -1e30])
def test_values_beyond_f16_are_refused_by_name(value: float, tmp_path: Path) -> None:
    largest = re.escape(f"{abs(value):g}")
    message = rf"blk\.1\.ffn_down\.weight has values up to {largest},.*65504.*--dtype bf16"
    with pytest.raises(CheckpointError, match=message):
        write_f16(cast_checkpoint(value), tmp_path)


@pytest.mark.parametrize("value", [65504.0, float("inf"), float("nan")])
def test_values_that_f16_has_are_kept(value: float, tmp_path: Path) -> None:
    paths = write_f16(cast_checkpoint(value), tmp_path)
    last = ArchiveReader(paths[2]).read("blk.1.ffn_down.weight.rank1")
    np.testing.assert_array_equal(last[63, 63], np.float16(value))


def test_an_unknown_dtype_is_refused_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'fp8'; choose from f32, f16, bf16"):
        split(model_config(), 2, tmp_path, "fp8")


@pytest.mark.parametrize(("dtype", "one"), [("f32", "<f4"), ("f16", "<f2"), ("bf16", "<f4")])
def test_dummy_archives_are_small_and_hold_small_numbers(
    dtype: str, one: str, tmp_path: Path
) -> None:
    config = model_config(vocab_size=128256, intermediate_size=28672)
    plan = plan_parameters(config, 2)
    identity = Identity(model="c" * 64, tp=2, rank=None, dtype=dtype)
    paths = write_dummy_archives(config, plan, identity=identity, out_dir=tmp_path)
    assert sum(path.stat().st_size for path in paths) < 32_000
    table = ArchiveReader(paths[2]).read("token_embd.weight.rank1")
    assert table.shape == (64128, 64)
    first = table[:1, :1]
    if dtype == "bf16":  # the upper half of an f32
        first = first.astype("<u4") << 16
    assert first.view(one).item() == 2**-7


def test_torch_keeps_its_threads(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    split(model_config(), 2, tmp_path)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_however_it_is_read_the_archives_are_the_same(
    tp: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Straight from the file into memory that is used again, or computed by the checkpoint."""
    config = tiny_config(attention_bias=True)
    directory = write_tiny(tmp_path / "t0", config=config, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(directory)
    plan = plan_parameters(checkpoint.config, tp)
    identity = Identity(model="c" * 64, tp=tp, rank=None, dtype=dtype)
    digests = []
    for how in ("straight", "computed"):
        if how == "computed":
            monkeypatch.setattr(type(checkpoint), "extent", lambda *_: None)
        (tmp_path / how).mkdir()
        seen: list[tuple[int, int]] = []
        paths = write_archives(
            checkpoint,
            plan,
            identity=identity,
            out_dir=tmp_path / how,
            progress=lambda done, total, seen=seen: seen.append((done, total)),
        )
        total = sum(info.num_bytes for info in checkpoint.parameters.values())
        assert seen[-1] == (total, total)
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in paths])
    assert digests[0] == digests[1]


def test_a_checkpoint_cut_while_it_is_read_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path / "t0"))
    (path,) = checkpoint.weight_paths
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    identity = Identity(model="c" * 64, tp=1, rank=None, dtype="f32")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: has \d+ bytes, expected \d+"):
        write_archives(
            checkpoint,
            plan_parameters(checkpoint.config, 1),
            identity=identity,
            out_dir=tmp_path,
        )


def test_bf16_becomes_f16_as_torch_has_it(tmp_path: Path) -> None:
    """By way of f32: rounded once, subnormals included."""
    config = model_config()
    checkpoint = CountingCheckpoint(config)
    bits = torch.arange(0, 1 << 16, 2, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.where(bits.abs() < 65504, bits, 0.5)
    for name, tensor in checkpoint.tensors.items():
        some = values[: tensor.numel()] if tensor.numel() < len(values) else values
        checkpoint.tensors[name] = some.repeat(-(-tensor.numel() // len(some)))[
            : tensor.numel()
        ].reshape(tensor.shape)
        checkpoint.parameters[name] = ParameterInfo(shape=tuple(tensor.shape), dtype=torch.bfloat16)
    identity = Identity(model="c" * 64, tp=1, rank=None, dtype="f16")
    (path,) = write_archives(
        checkpoint, plan_parameters(config, 1), identity=identity, out_dir=tmp_path
    )
    archive = ArchiveReader(path)
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(archive.read(name), tensor.to(torch.float16).numpy())
