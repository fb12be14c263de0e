"""sharding/plan.py: the rules of dealing by example; random shapes are in property/."""

from __future__ import annotations

import pytest

from bundles import model_config
from shark_llm.artifacts.manifest import Replicate, Split
from shark_llm.errors import ShardingError
from shark_llm.model.config import ModelConfig
from shark_llm.sharding.plan import (
    local_parameters,
    parameter_shapes,
    plan_parameters,
    plan_ranks,
    shape_key,
    supported_tps,
)


def heads_config(heads: int, kv_heads: int, **more: object) -> ModelConfig:
    return model_config(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=heads * 16,
        head_dim=16,
        **more,
    )


def counts(heads: int, kv_heads: int, tp: int) -> list[tuple[int, int]]:
    ranks = plan_ranks(heads_config(heads, kv_heads), tp)
    return [(rank.num_heads, rank.num_kv_heads) for rank in ranks]


@pytest.mark.parametrize(
    ("tp", "expected"),
    [
        (1, [(9, 3)]),
        (2, [(6, 2), (3, 1)]),
        (3, [(3, 1)] * 3),
        (4, [(2, 1), (1, 1), (3, 1), (3, 1)]),
        (5, [(2, 1), (1, 1), (2, 1), (1, 1), (3, 1)]),
        (8, [(1, 1)] * 6 + [(2, 1), (1, 1)]),
    ],
)
def test_smollm2_heads_at_every_kind_of_tp(tp: int, expected: list[tuple[int, int]]) -> None:
    """B03: 9 query and 3 kv heads, where neither divides the other."""
    assert counts(9, 3, tp) == expected


def test_replicated_kv_heads_stay_whole_and_in_order() -> None:
    """B01: at tp8 with 2 kv heads, rank r holds all of kv head floor(r * 2 / 8)."""
    config = heads_config(8, 2)
    ranks = plan_ranks(config, 8)
    assert [list(rank.kv_heads) for rank in ranks] == [[0]] * 4 + [[1]] * 4
    k = plan_parameters(config, 8)["blk.0.attn_k.weight"]
    assert isinstance(k, Split)
    assert k.ranges == ((0, 16),) * 4 + ((16, 32),) * 4


def test_a_tp_beyond_the_query_heads_is_refused_with_those_that_work() -> None:
    """B04: the refusal needs only the config and lists the valid tp."""
    config = heads_config(4, 2)
    assert supported_tps(config) == (1, 2, 3, 4)
    with pytest.raises(ShardingError, match=r"tp 5 .*4 query heads.*values that work: 1, 2, 3, 4"):
        plan_parameters(config, 5)
    for tp in (0, -1, 9):
        with pytest.raises(ShardingError, match=f"tp {tp} "):
            plan_ranks(heads_config(16, 16), tp)


def test_mlp_columns_that_do_not_divide_are_dealt_not_cut() -> None:
    """B04: 130 columns at tp4 give 33, 33, 32, 32: nothing is lost."""
    ranks = plan_ranks(model_config(intermediate_size=130), 4)
    assert [rank.intermediate_size for rank in ranks] == [33, 33, 32, 32]


def test_vocab_rows_that_do_not_divide_are_dealt_not_padded() -> None:
    """B05: 257 rows at tp 2, 4: all rows are held, and sizes differ by at most one."""
    config = model_config(vocab_size=257)
    assert [rank.vocab_size for rank in plan_ranks(config, 2)] == [129, 128]
    assert [rank.vocab_size for rank in plan_ranks(config, 4)] == [65, 64, 64, 64]


def test_large_sizes_are_dealt_in_tiles() -> None:
    ranks = plan_ranks(heads_config(9, 3, intermediate_size=1536, vocab_size=49152), 5)
    assert [rank.intermediate_size for rank in ranks] == [320, 304, 304, 304, 304]
    assert [rank.vocab_size % 16 for rank in ranks] == [0] * 5
    odd = plan_ranks(model_config(vocab_size=32001), 4)
    assert [rank.vocab_size for rank in odd] == [8000, 8000, 8000, 8001]


def test_biases_follow_their_weights_and_row_biases_stay_on_rank_0() -> None:
    """B08: column biases are split along their only axis, row biases are whole, once."""
    config = model_config(attention_bias=True, mlp_bias=True)
    plan = plan_parameters(config, 2)
    assert plan["blk.1.attn_q.bias"] == Split(dim=0, ranges=((0, 32), (32, 64)))
    assert plan["blk.1.ffn_up.bias"] == Split(dim=0, ranges=((0, 64), (64, 128)))
    assert plan["blk.1.attn_output.weight"] == Split(dim=1, ranges=((0, 32), (32, 64)))
    assert plan["blk.1.attn_output.bias"] == Split(dim=0, ranges=((0, 64), (0, 0)))
    assert [rank.has_row_biases for rank in plan_ranks(config, 2)] == [True, False]
    assert "blk.1.ffn_down.bias" in local_parameters(config, plan, 0, "f32")
    assert "blk.1.ffn_down.bias" not in local_parameters(config, plan, 1, "f32")


def test_scales_are_split_with_rows_and_replicated_where_columns_are_split() -> None:
    config = model_config()
    plan = plan_parameters(config, 2, quantized=True)
    for name in ("token_embd", "output", "blk.0.attn_k", "blk.1.ffn_up"):
        assert plan[f"{name}.scale"] == plan[f"{name}.weight"] != Replicate()
    for name in ("blk.0.attn_output", "blk.1.ffn_down"):
        assert plan[f"{name}.scale"] == Replicate()
    assert "output_norm.scale" not in plan
    local = local_parameters(config, plan, 1, "bf16")
    assert local["blk.0.attn_q.scale"].key == "blk.0.attn_q.scale.rank1"
    assert local["blk.0.attn_q.scale"].shape == local["blk.0.attn_q.weight"].shape[:1]
    assert local["blk.0.ffn_down.scale"].key == "blk.0.ffn_down.scale"
    dtypes = {name.rpartition(".")[2]: p.dtype for name, p in local.items() if "norm" not in name}
    assert dtypes == {"weight": "i8", "scale": "f32"}
    assert local["blk.0.attn_norm.weight"].dtype == "bf16"


def test_local_parameters_carry_keys_and_cut_shapes() -> None:
    """A05 at tp2: head_dim is not hidden / heads."""
    config = model_config(hidden_size=160, head_dim=64)
    local = local_parameters(config, plan_parameters(config, 2), 1, "f32")
    assert local["blk.0.attn_q.weight"].key == "blk.0.attn_q.weight.rank1"
    assert local["blk.0.attn_q.weight"].shape == (128, 160)
    assert local["blk.0.attn_k.weight"].shape == (64, 160)
    assert local["blk.0.attn_output.weight"].shape == (160, 128)
    assert local["blk.0.attn_norm.weight"].key == "blk.0.attn_norm.weight"
    assert local["output_norm.weight"].shape == (160,)


def test_tp1_replicates_everything_under_plain_names() -> None:
    config = model_config(attention_bias=True)
    plan = plan_parameters(config, 1)
    assert set(plan.values()) == {Replicate()}
    assert all(p.key == name for name, p in local_parameters(config, plan, 0, "f32").items())


def test_a_tied_model_has_one_vocab_parallel_table() -> None:
    plan = plan_parameters(model_config(tie_word_embeddings=True), 2)
    assert "output.weight" not in plan
    assert plan["token_embd.weight"] == Split(dim=0, ranges=((0, 128), (128, 256)))


def test_untied_parameters_are_named_once_in_order() -> None:
    names = list(parameter_shapes(model_config()))
    assert names[0] == "token_embd.weight"
    assert names[-2:] == ["output_norm.weight", "output.weight"]
    assert len(names) == 3 + 2 * 9


def test_equal_ranks_share_a_shape_key() -> None:
    config = heads_config(8, 8, intermediate_size=128, vocab_size=256)
    assert len({shape_key(rank) for rank in plan_ranks(config, 8)}) == 1
    assert len({shape_key(rank) for rank in plan_ranks(config, 3)}) > 1


def test_uneven_groups_are_refused() -> None:
    config = heads_config(8, 2)
    object.__setattr__(config, "num_kv_heads", 3)
    with pytest.raises(ShardingError, match="8 query heads are not a multiple of 3 kv heads"):
        plan_ranks(config, 1)
