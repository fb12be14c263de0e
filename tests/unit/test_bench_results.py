"""Samples of a benchmark: medians, paired ratios, the floor's bytes, the file that keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_samples import PEER, a_case, a_result, a_round, results, steps, timing
from bundles import fill, sample_manifest
from shark_llm.artifacts.irpa import ArchiveReader
from shark_llm.artifacts.manifest import CacheSpec, EntryPoint
from shark_llm.artifacts.publish import publish
from shark_llm.errors import UsageError


def test_a_round_is_its_median_step() -> None:
    """One interrupted step does not move the figure; the CPU time is the mean of all."""
    measured = a_round(10, 12, 500, cpu=0.5)
    assert measured.seconds == pytest.approx(0.012)
    assert measured.cpu_seconds == pytest.approx(0.087)


def test_ratios_are_paired_by_round() -> None:
    """A machine that slows down in the second round slows both sides, and the ratio stays."""
    case = a_case([a_round(10), a_round(40), a_round(10)], [a_round(15), a_round(60), a_round(20)])
    assert case.ratios(PEER) == pytest.approx([1.5, 1.5, 2.0])
    assert case.tokens == 4
    assert case.side(PEER).seconds == pytest.approx(0.020)


def test_unequal_rounds_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        results.paired_ratios([1.0, 2.0], [1.0])


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentile_is_a_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = results.percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9


def test_percentile_ends() -> None:
    assert results.percentile([3, 1, 2], 0) == 1
    assert results.percentile([3, 1, 2], 0.5) == 2
    assert results.percentile([3, 1, 2], 1) == 3


def test_the_floor_takes_the_fastest_that_memory_was() -> None:
    bandwidth = results.Bandwidth(cores=1, triad=[8.0, 9.0], read=[11.0, 10.0])
    result = a_result(bandwidth=[bandwidth])
    assert result.bandwidth_of(1) == 11.0
    assert result.bandwidth_of(2) is None


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = a_result(steps=[a_case([a_round(1, 2)], [a_round(3, 4)])])
    path = tmp_path / "deeper" / "result.json"
    results.write(result, path)
    assert results.read(path) == result
    assert '"wall_us": [1000, 2000]' in path.read_text(), "samples stand on one line"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with pytest.raises(UsageError, match=r"cannot read .*result\.json"):
        results.read(path)
    path.write_text(json.dumps({**json.loads(a_result().model_dump_json()), "surprise": 1}))
    with pytest.raises(UsageError, match="surprise: Extra inputs"):
        results.read(path)


def test_timing_leaves_the_warmup_out() -> None:
    """Both callbacks see every step in order, the untimed one first; only counted steps return."""
    calls: list[str] = []
    measured = results.Round.model_validate(
        timing.timed(
            lambda i: calls.append(f"step {i}"),
            steps=2,
            warmup=1,
            untimed=lambda i: calls.append(f"before {i}"),
        )
    )
    assert calls == ["before 0", "step 0", "before 1", "step 1", "before 2", "step 2"]
    assert len(measured.wall_us) == 2
    assert 0 <= measured.others <= 1


def test_kv_bytes_are_those_of_the_mean_step() -> None:
    """Behind 100 tokens and 2 warm-up steps, 4 steps attend to 103, 104, 105 and 106 positions."""
    caches = tuple(
        CacheSpec(name=name, dtype="bf16", shape=("pool_pages", 16 * 48), rank=0) for name in "kv"
    )
    manifest = sample_manifest(caches=caches)
    decode = steps.Shape(phase="decode", batch=1, context=100)
    assert steps.kv_bytes(manifest, decode, 4) == 104.5 * 2 * 48 * 2
    prefill = steps.Shape(phase="prefill", batch=1, context=100)
    assert steps.kv_bytes(manifest, prefill, 4) == 0


def test_weight_bytes_leave_out_an_untied_embedding(tmp_path: Path) -> None:
    """Of an untied table a step reads rows; a tied one is read whole, as the head's weights."""
    with publish(tmp_path / "bundle") as staging:
        fill(staging, tp=1)
    manifest = sample_manifest(tp=1)
    entries = ArchiveReader(tmp_path / "bundle" / "model.irpa").entries.values()
    everything = sum(entry.nbytes for entry in entries)
    table = 256 * 64 * 4
    assert steps.weight_bytes(tmp_path / "bundle", manifest) == everything - table
    tied = sample_manifest(tp=1, config=manifest.config | {"tie_word_embeddings": True})
    assert steps.weight_bytes(tmp_path / "bundle", tied) == everything


@pytest.mark.parametrize(
    ("dtype", "batch", "context", "message"),
    [
        ("bf16", 1, 64, "the bundle is in f32, --dtype is bf16"),
        ("f32", 2, 64, "no decode of batch 2, only of 1 4"),
        ("f32", 4, 506, "is 513 tokens, the bundle allows 512"),
    ],
)
def test_what_a_bundle_cannot_run_is_refused_first(
    dtype: str, batch: int, context: int, message: str, tmp_path: Path
) -> None:
    entries = tuple(
        EntryPoint(name=f"decode_bs{n}", phase="decode", batch_size=n, inputs=(), results=())
        for n in (1, 4)
    )
    setup = steps.Setup(bundle=tmp_path, dtype=dtype, device="local-task", rounds=1, steps=5)
    shape = steps.Shape(phase="decode", batch=batch, context=context)
    with pytest.raises(UsageError, match=message):
        steps.check(sample_manifest(entry_points=entries), setup, [shape])
