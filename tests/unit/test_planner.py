"""planner.py: numbers that can be checked by hand, and the answer for Llama 3.1 405B."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from bundles import model_config
from shark_llm.artifacts.irpa import ArchiveReader, Identity
from shark_llm.compile.targets import TARGETS
from shark_llm.compile.workspace_estimate import ModuleShape
from shark_llm.errors import CapacityError, ShardingError, UsageError
from shark_llm.model.config import ModelConfig
from shark_llm.planner import (
    GIB,
    GPUS,
    DeviceMemory,
    check_capacity,
    check_fits,
    device_memory,
    plan_memory,
    required_bytes,
)
from shark_llm.sharding.archives import write_dummy_archives
from shark_llm.sharding.plan import plan_parameters


def llama(hidden: int, mlp: int, layers: int, heads: int) -> ModelConfig:
    return model_config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )


LLAMA_405B = llama(16384, 53248, 126, 128)
LLAMA_8B = llama(4096, 14336, 32, 32)


def test_the_lower_bound_of_tp_for_405b_in_bf16() -> None:
    """On 192 GiB, tp4 holds the weights and little beside them; tp5 one full context."""
    plan = plan_memory(LLAMA_405B, memory_bytes=GPUS["mi300x"], dtype="bf16", kv_dtype="bf16")
    assert plan.lower_bound == 5
    assert [split.tp for split in plan.splits] == list(range(1, 9))
    assert [split.fits for split in plan.splits] == [False] * 4 + [True] * 4
    four, five = plan.splits[3:5]
    assert four.ranks[0].weight_bytes < GPUS["mi300x"] - 2 * GIB
    assert (four.kv_tokens, four.longest_len) == (0, 1213)
    assert five.kv_tokens > five.longest_len == 131072


def test_weights_and_kv_by_hand() -> None:
    """Llama 3.1 8B has 8,030,261,248 parameters and 128 KiB of bf16 KV a token."""
    plan = plan_memory(
        LLAMA_8B,
        memory_bytes=24 * GIB,
        dtype="bf16",
        kv_dtype="bf16",
        tps=[2, 1],
        workspace={1: [GIB], 2: [GIB, GIB]},
    )
    (alone,), halves = (split.ranks for split in plan.splits)
    assert alone.weight_bytes == 2 * 8_030_261_248
    assert alone.kv_bytes_per_token == 128 * 1024
    assert alone.kv_tokens == (24 * GIB - 2 * GIB - GIB - alone.weight_bytes) // (128 * 1024)
    assert [rank.kv_bytes_per_token for rank in halves] == [64 * 1024] * 2
    norms = (2 * 32 + 1) * 4096 * 2
    assert sum(rank.weight_bytes for rank in halves) == alone.weight_bytes + norms


def test_kv_bytes_follow_the_heads_that_a_rank_holds() -> None:
    """B02: 2 kv heads at tp4 are one head a rank, not half a head and not 4 heads in all."""
    plan = plan_memory(
        model_config(), memory_bytes=64 * GIB, dtype="f32", kv_dtype="f16", tps=[1, 4]
    )
    per_head = 2 * 2 * 16 * 2  # K and V, layers, head_dim, bytes
    assert [rank.kv_bytes_per_token for rank in plan.splits[0].ranks] == [2 * per_head]
    assert [rank.kv_bytes_per_token for rank in plan.splits[1].ranks] == [per_head] * 4


def test_the_tightest_rank_decides() -> None:
    config = model_config(
        num_attention_heads=9, num_key_value_heads=3, hidden_size=576, head_dim=64
    )
    plan = plan_memory(config, memory_bytes=4 * GIB, dtype="f32", kv_dtype="f32", tps=[2])
    (split,) = plan.splits
    assert split.ranks[0].kv_tokens < split.ranks[1].kv_tokens
    assert split.kv_tokens == split.ranks[0].kv_tokens


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    plan = plan_memory(LLAMA_405B, memory_bytes=GPUS["mi300x"], dtype="bf16", kv_dtype="bf16")
    with pytest.raises(
        CapacityError, match=r"tp 4 .*mi300x with 192 GiB: rank 0 has 189\.0 GiB.*fits is 5"
    ):
        check_fits(plan.splits[3], plan, device="mi300x")
    check_fits(plan.splits[4], plan, device="mi300x")
    small = plan_memory(LLAMA_405B, memory_bytes=GPUS["mi250x"], dtype="bf16", kv_dtype="bf16")
    assert small.lower_bound is None
    with pytest.raises(CapacityError, match="no tp fits: lower --max-model-len"):
        check_fits(small.splits[7], small, device="mi250x")


@pytest.mark.parametrize("which", ["dtype", "kv_dtype"])
def test_unknown_dtypes_are_refused(which: str) -> None:
    dtypes = {"dtype": "f32", "kv_dtype": "f32"} | {which: "int3"}
    with pytest.raises(UsageError, match="'int3'; choose from f32, f16, bf16"):
        plan_memory(model_config(), memory_bytes=GIB, **dtypes)


def test_an_impossible_tp_is_refused() -> None:
    with pytest.raises(ShardingError, match="tp 5"):
        plan_memory(model_config(), memory_bytes=GIB, dtype="f32", kv_dtype="f32", tps=[5])


@pytest.mark.parametrize("tp", [1, 3])
def test_required_bytes_are_those_of_the_files(tp: int, tmp_path: Path) -> None:
    config = model_config(num_hidden_layers=3)
    identity = Identity(model="e" * 64, tp=tp, rank=None, dtype="bf16")
    plan = plan_parameters(config, tp)
    paths = write_dummy_archives(config, plan, identity=identity, out_dir=tmp_path)
    needed = required_bytes(config, tp=tp, dtype="bf16", dummy=True)
    assert needed == {path.name: path.stat().st_size for path in paths}
    real = required_bytes(config, tp=tp, dtype="bf16")
    for path in paths:
        data = sum(entry.nbytes for entry in ArchiveReader(path).entries.values())
        assert data < real[path.name] < data + 20_000


def test_a_shorter_context_is_named_as_a_remedy() -> None:
    """Shorter sequences need less workspace too, so that more of them fit than at full length."""
    device = DeviceMemory(name="some GPU", num_bytes=176 * GIB)
    ask = partial(check_capacity, LLAMA_405B, device, tp=5, dtype="bf16")
    with pytest.raises(CapacityError, match="tp that fits is 6; tp 5 fits with") as refusal:
        ask(max_model_len=131072)
    found = re.search(r"room for (\d+) KV tokens.*--max-model-len (\d+)$", str(refusal.value))
    assert found is not None
    left, longest = map(int, found.groups())
    assert left < longest < 131072
    ask(max_model_len=longest)
    with pytest.raises(CapacityError, match=f"--max-model-len {longest}$"):
        ask(max_model_len=longest + 1)


def test_steps_and_contexts_take_of_the_room_for_kv() -> None:
    ask = partial(
        plan_memory, LLAMA_8B, memory_bytes=GPUS["mi300x"], dtype="bf16", kv_dtype="bf16", tps=[2]
    )
    (usual,), (shorter,), (larger,), (host,) = (
        plan.splits
        for plan in (
            ask(),
            ask(max_model_len=8192),
            ask(module=ModuleShape(prefill_tokens=2048)),
            ask(module=ModuleShape(attention_form="matmul")),
        )
    )
    needs = [split.ranks[0].workspace_bytes for split in (host, shorter, usual, larger)]
    assert needs == sorted(set(needs))
    tokens = [split.kv_tokens for split in (host, shorter, usual, larger)]
    assert tokens == sorted(set(tokens), reverse=True)


def test_ranks_that_share_a_memory_share_its_rest() -> None:
    """Replicated kv heads cost a CPU more memory at each rank: 4 ranks at 2 kv heads hold 4."""
    alone, four = plan_memory(
        model_config(),
        memory_bytes=4 * GIB,
        is_shared=True,
        dtype="f32",
        kv_dtype="f32",
        tps=[1, 4],
        workspace={1: [0], 4: [0] * 4},
    ).splits
    assert alone.kv_tokens // 2 == pytest.approx(four.kv_tokens, rel=1e-3)


def test_the_device_of_a_target() -> None:
    assert device_memory(TARGETS["gfx942"]) == DeviceMemory(name="mi300x", num_bytes=192 * GIB)
    assert device_memory(TARGETS["gfx942"], "mi300a").num_bytes == 128 * GIB
    assert device_memory(TARGETS["gfx1100"]).name == "gfx1100"
    cpu = device_memory(TARGETS["x86-64-v3"])
    assert cpu.is_shared
    assert cpu.num_bytes > GIB
    with pytest.raises(UsageError, match="--compile-target gfx950, or another GPU"):
        device_memory(TARGETS["gfx942"], "mi355x")
