"""Plans of random shapes: every part is dealt exactly once, and merging undoes the split."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundles import model_config
from shark_llm.artifacts.irpa import ArchiveReader, Identity, archive_ranks
from shark_llm.artifacts.manifest import Replicate
from shark_llm.checkpoint.source import ParameterInfo
from shark_llm.golden import read_parameters
from shark_llm.model.config import ModelConfig
from shark_llm.sharding import apply
from shark_llm.sharding.plan import (
    TILE,
    local_parameters,
    parameter_shapes,
    plan_parameters,
    plan_ranks,
    supported_tps,
)


@st.composite
def configs(draw: st.DrawFn, *, big: bool = False) -> ModelConfig:
    kv_heads = draw(st.integers(1, 9))
    heads = kv_heads * draw(st.integers(1, 5))
    widest = 40_000 if big else 40
    return model_config(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        hidden_size=draw(st.integers(1, 12)) * 2,
        intermediate_size=draw(st.integers(1, widest)),
        vocab_size=draw(st.integers(3, widest)),
        num_hidden_layers=draw(st.integers(1, 2)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )


def covers(ranges: list[range], size: int) -> bool:
    """Whether contiguous ranges, in rank order, are exactly 0 .. size - 1."""
    joined = all(left.stop == right.start for left, right in pairwise(ranges))
    return joined and ranges[0].start == 0 and ranges[-1].stop == size


@given(config=configs(big=True), data=st.data())
def test_ranks_share_everything_out(config: ModelConfig, data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from(supported_tps(config)))
    ranks = plan_ranks(config, tp)
    group = config.num_heads // config.num_kv_heads
    assert covers([rank.heads for rank in ranks], config.num_heads)
    assert covers([rank.intermediate for rank in ranks], config.intermediate_size)
    assert covers([rank.vocab for rank in ranks], config.vocab_size)
    for rank in ranks:
        assert min(rank.num_heads, rank.num_kv_heads) > 0
        assert min(rank.intermediate_size, rank.vocab_size) > 0
        assert {head // group for head in rank.heads} == set(rank.kv_heads)
        assert rank.num_heads % rank.num_kv_heads == 0
        local_group = rank.num_heads // rank.num_kv_heads
        for i, head in enumerate(
            rank.heads
        ):  # what the fragment computes locally is globally right
            assert rank.kv_heads[i // local_group] == head // group
    if tp <= config.num_kv_heads:
        assert covers([rank.kv_heads for rank in ranks], config.num_kv_heads)
    else:
        wanted = [[rank * config.num_kv_heads // tp] for rank in range(tp)]
        assert [list(rank.kv_heads) for rank in ranks] == wanted
    for sizes in ([r.intermediate_size for r in ranks], [r.vocab_size for r in ranks]):
        assert max(sizes) - min(sizes) <= TILE


class RandomCheckpoint:
    """A checkpoint in memory, each parameter of a dtype of its own."""

    notes: tuple[str, ...] = ()
    aux_files: Mapping[str, bytes] = {}

    def __init__(self, config: ModelConfig, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        self.config = config
        self.tensors = {
            name: torch.randn(shape, generator=generator).to(dtypes[i % 3])
            for i, (name, shape) in enumerate(parameter_shapes(config).items())
        }
        self.parameters = {
            name: ParameterInfo(shape=tuple(tensor.shape), dtype=tensor.dtype)
            for name, tensor in self.tensors.items()
        }

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.tensors[name][start:stop].clone()

    def extent(self, name: str) -> None:
        """In memory alone."""

    def digest(self, progress: object = None) -> str:
        return "d" * 64


@settings(max_examples=40, deadline=None)
@given(
    config=configs(),
    dtype=st.sampled_from(["f32", "f16", "bf16"]),
    quantized=st.booleans(),
    data=st.data(),
)
def test_split_then_merge_is_the_identity(
    config: ModelConfig, dtype: str, quantized: bool, data: st.DataObject
) -> None:
    """Of quantized weights: the identity on what quantizing them as a whole gives."""
    tp = data.draw(st.sampled_from(supported_tps(config)))
    plan = plan_parameters(config, tp, quantized=quantized)
    checkpoint = RandomCheckpoint(config, seed=data.draw(st.integers(0, 99)))
    identity = Identity(
        model=checkpoint.digest(),
        tp=tp,
        rank=None,
        dtype=dtype,
        weights_dtype="int8" if quantized else None,
    )
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "BLOCK_BYTES", data.draw(st.sampled_from([64, 999, 1 << 20])))
        seen: list[tuple[int, int]] = []
        paths = apply.write_archives(
            checkpoint,
            plan,
            identity=identity,
            out_dir=Path(directory),
            progress=lambda done, total: seen.append((done, total)),
        )
        assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in checkpoint.tensors.values())
        archives = {r: ArchiveReader(p) for r, p in zip(archive_ranks(tp), paths, strict=True)}
        wanted = read_parameters(checkpoint, apply.TORCH_DTYPES[dtype], quantized=quantized)
        for name, tensor in wanted.items():
            merged = apply.merge_parameter(archives, name, plan[name], tuple(tensor.shape))
            assert merged.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
        _check_shards(config, plan, archives, tp, dtype)


def _check_shards(config, plan, archives, tp, dtype) -> None:  # type: ignore[no-untyped-def]
    """Each rank finds all its parameters, in the shapes that the exporter expects, and no more."""
    seen: set[str] = set()
    for rank in range(tp):
        for name, part in local_parameters(config, plan, rank, dtype).items():
            owner = None if isinstance(plan[name], Replicate) else rank
            entry = archives[owner].entries[part.key]
            assert (entry.shape, entry.dtype) == (part.shape, part.dtype)
            seen.add(part.key)
    assert seen == {key for archive in archives.values() for key in archive.entries}
