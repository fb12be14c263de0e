"""A checkpoint of config.json alone: shapes, dummy values, identity."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shark_llm.artifacts.irpa import ArchiveReader, Identity
from shark_llm.checkpoint.config_only import DUMMY_VALUE, ConfigOnlyCheckpoint
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.errors import CheckpointError, UnsupportedModelError
from shark_llm.hub import HubSettings, fetch_metadata, parse_model
from shark_llm.sharding.apply import TORCH_DTYPES, merge_parameter
from shark_llm.sharding.archives import write_dummy_archives
from shark_llm.sharding.plan import parameter_shapes, plan_parameters
from tiny import tiny_config, write_tiny


def write_config(path: Path, **overrides: object) -> Path:
    path.write_text(json.dumps(tiny_config(**overrides)))
    return path


def test_it_has_the_shapes_of_the_checkpoint(tmp_path: Path) -> None:
    """The same config, parameters, small files and EOS ids as with the weights."""
    directory = write_tiny(tmp_path / "t0", generation_config={"eos_token_id": [2, 4]})
    real, alone = open_checkpoint(directory), ConfigOnlyCheckpoint(directory)
    assert alone.config == real.config
    assert alone.config.eos_token_ids == (2, 4)
    assert alone.parameters == real.parameters
    assert alone.aux_files == real.aux_files


@pytest.mark.parametrize("name", ["config.json", "Llama-0.1B.json"])
def test_a_file_will_do(tmp_path: Path, name: str) -> None:
    path = write_config(tmp_path / name, torch_dtype="bfloat16", attention_bias=True)
    checkpoint = ConfigOnlyCheckpoint(path)
    assert {name: info.shape for name, info in checkpoint.parameters.items()} == parameter_shapes(
        checkpoint.config
    )
    assert {info.dtype for info in checkpoint.parameters.values()} == {torch.bfloat16}
    metadata = fetch_metadata(parse_model(str(path)), settings=HubSettings())
    assert metadata.name == (tmp_path.name if name == "config.json" else "Llama-0.1B")
    assert metadata.config == json.loads(path.read_text())
    assert metadata.missing_bytes == metadata.total_bytes == 0


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_archives_hold_what_it_reads(tmp_path: Path, dtype: str) -> None:
    checkpoint = ConfigOnlyCheckpoint(write_config(tmp_path / "config.json"))
    plan = plan_parameters(checkpoint.config, 2)
    identity = Identity(model=checkpoint.digest(), tp=2, rank=None, dtype=dtype)
    paths = write_dummy_archives(checkpoint.config, plan, identity=identity, out_dir=tmp_path)
    archives = dict(zip((None, 0, 1), map(ArchiveReader, paths), strict=True))
    assert all(path.stat().st_size < 64 << 10 for path in paths)
    for name, shape in parameter_shapes(checkpoint.config).items():
        stored = torch.from_numpy(np.array(merge_parameter(archives, name, plan[name], shape)))
        read = checkpoint.read(name, 0, shape[0]).to(TORCH_DTYPES[dtype])
        assert torch.equal(stored.view(TORCH_DTYPES[dtype]), read)
        assert set(read.flatten().tolist()) == {DUMMY_VALUE}


def test_configs_are_told_apart(tmp_path: Path) -> None:
    first = ConfigOnlyCheckpoint(write_config(tmp_path / "a.json"))
    again = ConfigOnlyCheckpoint(write_config(tmp_path / "b.json"))
    other = ConfigOnlyCheckpoint(write_config(tmp_path / "c.json", rope_theta=5.0))
    assert first.digest() == again.digest() != other.digest()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ConfigOnlyCheckpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"gone\.json: cannot be read: No such file"):
        ConfigOnlyCheckpoint(tmp_path / "gone.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no JSON object"):
        ConfigOnlyCheckpoint(tmp_path / "list.json")
    with pytest.raises(UnsupportedModelError, match="gelu"):
        ConfigOnlyCheckpoint(write_config(tmp_path / "gelu.json", hidden_act="gelu"))
    with pytest.raises(CheckpointError, match="name a directory with weights"):
        open_checkpoint(tmp_path / "gelu.json")
