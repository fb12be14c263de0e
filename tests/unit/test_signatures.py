"""Entry points and caches as data."""

from __future__ import annotations

import pytest

from bundles import model_config
from shark_llm.errors import UsageError
from shark_llm.export.signatures import ExportSettings, cache_specs, entry_points, softmax_sums
from shark_llm.sharding.plan import plan_ranks


def test_entry_points_in_order_with_their_shapes() -> None:
    settings = ExportSettings(batch_sizes_prefill=(1, 4), batch_sizes_decode=(2,))
    entries = entry_points(settings, 256)
    assert [entry.name for entry in entries] == ["prefill_bs1", "prefill_bs4", "decode_bs2"]
    for entry in entries:
        n = entry.batch_size
        shapes = {spec.name: (spec.dtype, spec.shape) for spec in entry.inputs}
        assert shapes == {
            "tokens": ("i64", (n, "seq" if entry.phase == "prefill" else 1)),
            "start_positions": ("i64", (n,)),
            "seq_lens": ("i64", (n,)),
            "page_table": ("i64", (n, "table_pages")),
        }
        assert [(r.name, r.dtype, r.shape) for r in entry.results] == [
            ("logits", "f32", (n, 256)),
            ("best_tokens", "i64", (n,)),
        ]


@pytest.mark.parametrize(("vocab_size", "blocks"), [(256, 1), (257, 2), (128256, 501)])
def test_sums_for_every_batch_size_that_leaves_logits(vocab_size: int, blocks: int) -> None:
    settings = ExportSettings(batch_sizes_prefill=(1, 4), batch_sizes_decode=(1, 2))
    found = softmax_sums(settings, vocab_size)
    assert [sums.name for sums in found] == [f"softmax_sums_bs{n}" for n in (1, 2, 4)]
    for sums in found:
        n = sums.batch_size
        assert [spec.shape for spec in sums.inputs] == [(n, vocab_size), (n,), (n,)]
        assert [spec.shape for spec in sums.results] == [(n, blocks)]


@pytest.mark.parametrize(("tp", "heads"), [(1, [3]), (2, [2, 1]), (3, [1, 1, 1]), (8, [1] * 8)])
def test_caches_have_each_ranks_own_heads(tp: int, heads: list[int]) -> None:
    """B02: bytes of a page follow the heads that a rank holds, replicated or not."""
    config = model_config(hidden_size=144, num_attention_heads=9, num_key_value_heads=3)
    specs = cache_specs(config, ExportSettings(dtype="bf16"), plan_ranks(config, tp))
    assert len(specs) == tp * config.num_layers * 2
    for spec in specs:
        assert spec.shape == ("pool_pages", heads[spec.rank] * 16 * 16)
        assert spec.dtype == "bf16"
    names = [spec.name for spec in specs]
    assert names[:3] == ["rank0.blk.0.k_cache", "rank0.blk.0.v_cache", "rank0.blk.1.k_cache"]
    assert len(set(names)) == len(names)
    assert [spec.rank for spec in specs] == sorted(spec.rank for spec in specs)


@pytest.mark.parametrize("page_size", [0, 1, 3, 24, 512])
def test_page_size_is_a_power_of_two(page_size: int) -> None:
    with pytest.raises(UsageError, match=f"page size {page_size}: take a power of two from 2"):
        ExportSettings(page_size=page_size)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("sizes", [(), (0,), (4, 1), (2, 2), (257,)])
def test_batch_sizes_are_refused_by_name(phase: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=f"--batch-sizes-{phase}"):
        ExportSettings(**{f"batch_sizes_{phase}": sizes})
