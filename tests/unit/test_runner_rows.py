"""Rows become arrays, and limits are refused, without any device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from bundles import sample_manifest
from shark_llm.artifacts.manifest import Manifest, Target
from shark_llm.errors import CapacityError, DeviceError, UsageError
from shark_llm.export.signatures import ExportSettings, cache_specs, entry_points
from shark_llm.model.config import config_from_dict
from shark_llm.runtime import module
from shark_llm.runtime.devices import DeviceConfig, DeviceSet
from shark_llm.runtime.module import check_device, pack_rows
from shark_llm.runtime.runner import Row
from shark_llm.sharding.plan import plan_ranks


def manifest(tp: int = 1, **changes: Any) -> Manifest:
    made = sample_manifest(tp=tp)
    settings = ExportSettings(dtype="f32")
    config = config_from_dict(made.config)
    fields = {
        "entry_points": entry_points(settings, 256),
        "caches": cache_specs(config, settings, plan_ranks(config, tp)),
    }
    return made.model_copy(update=fields | changes)


def test_prefill_rows_are_padded_to_whole_pages() -> None:
    rows = [
        Row(tokens=[7] * 17, start=0, pages=[3, 4]),
        Row(tokens=[8, 9], start=32, pages=[5, 6, 7]),
    ]
    tokens, starts, lengths, table = pack_rows(rows, 4, 16, "prefill")
    assert tokens.shape == (4, 32)
    np.testing.assert_array_equal(tokens[0], [7] * 17 + [0] * 15)
    np.testing.assert_array_equal(tokens[1], [8, 9] + [0] * 30)
    np.testing.assert_array_equal(starts, [0, 32, 0, 0])
    np.testing.assert_array_equal(lengths, [17, 34, 1, 1])  # an unused row has one token
    np.testing.assert_array_equal(table, [[3, 4, 0], [5, 6, 7], [0, 0, 0], [0, 0, 0]])
    assert {array.dtype for array in (tokens, starts, lengths, table)} == {np.dtype(np.int64)}


@pytest.mark.parametrize(("count", "width"), [(1, 16), (15, 16), (16, 16), (17, 32), (32, 32)])
def test_exact_multiples_take_no_page_more(count: int, width: int) -> None:
    """C11."""
    pages = range(1, 1 + width // 16)
    tokens, _, lengths, table = pack_rows(
        [Row(tokens=[1] * count, start=0, pages=pages)], 1, 16, "prefill"
    )
    assert tokens.shape == (1, width)
    assert lengths.tolist() == [count]
    assert table.shape == (1, width // 16)


def test_decode_rows_have_one_token() -> None:
    """Also at position 0: a prompt of one token begins as a decode row."""
    rows = [Row(tokens=[5], start=0, pages=[1]), Row(tokens=[6], start=16, pages=[2, 3])]
    tokens, starts, lengths, table = pack_rows(rows, 4, 16, "decode")
    assert tokens.tolist() == [[5], [6], [0], [0]]
    assert starts.tolist() == [0, 16, 0, 0]
    assert lengths.tolist() == [1, 17, 1, 1]
    assert table.tolist() == [[1, 0], [2, 3], [0, 0], [0, 0]]


def test_device_ids_must_fit_the_ranks() -> None:
    assert DeviceConfig(driver="hip").resolved_ids(3) == (0, 1, 2)
    assert DeviceConfig(driver="hip", device_ids=(4, 1)).resolved_ids(2) == (4, 1)
    for ids, message in (
        ((0,), "--device-ids 0 names 1 devices, the bundle has tp 2: name 2 different ids"),
        ((1, 1), "--device-ids 1 1: every rank needs a device of its own, counted from 0"),
        ((0, -1), "--device-ids 0 -1: every rank needs"),
    ):
        with pytest.raises(DeviceError) as caught:
            DeviceConfig(driver="hip", device_ids=ids).resolved_ids(2)
        assert str(caught.value).startswith(message)


def test_unknown_driver_is_refused_with_the_list() -> None:
    with pytest.raises(DeviceError, match="no device driver 'vulkan': choose from local-task"):
        DeviceSet(DeviceConfig(driver="vulkan"), 1)


def test_driver_must_be_the_one_compiled_for() -> None:
    """Both names of the CPU's drivers are one; everything else is refused, naming both sides."""
    check_device(manifest(), DeviceConfig(driver="local-sync"))
    with pytest.raises(DeviceError, match=r"compiled for host \(local-task\), --device is hip"):
        check_device(manifest(), DeviceConfig(driver="hip"))
    gpu = manifest(target=Target(name="gfx942", driver="hip", flags=()))
    with pytest.raises(DeviceError, match=r"gfx942 \(hip\), --device is local-task"):
        check_device(gpu, DeviceConfig(driver="local-task"))


def test_cpu_must_have_the_modules_instructions() -> None:
    target = Target(name="host", driver="local-task", flags=(), cpu_features=("avx2", "avx9000"))
    with pytest.raises(DeviceError, match="a CPU with avx9000"):
        check_device(manifest(target=target), DeviceConfig(driver="local-task"))


def test_pool_has_the_scratch_page_on_top() -> None:
    made = manifest()
    assert module._num_pages(made, 16, 512) == 2
    assert module._num_pages(made, 100, 512) == 7
    with pytest.raises(UsageError, match="--kv-cache-tokens is 15; it must be at least one page"):
        module._num_pages(made, 15, 512)


def test_default_pool_is_what_batch_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows of the longest sequence, or half of what weights leave, whichever is less."""
    made = manifest()
    per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, kv heads, head_dim, bytes of f32
    assert module._bytes_per_token(made) == per_token
    monkeypatch.setattr(module, "_tokens_that_fit", lambda _: 10**9)
    assert module._num_pages(made, None, 512) == 1 + 8 * 512 // 16
    monkeypatch.setattr(module, "_tokens_that_fit", lambda _: 1000)
    assert module._num_pages(made, None, 512) == 1 + 1000 // 16
    monkeypatch.setattr(module, "_tokens_that_fit", lambda _: 15)
    with pytest.raises(CapacityError, match=f"one page of 16 tokens takes {16 * per_token} bytes"):
        module._num_pages(made, None, 512)


def test_model_length_is_limited_by_the_bundle() -> None:
    made = manifest()
    assert module._max_model_len(made, None) == 512
    assert module._max_model_len(made, 100) == 100
    with pytest.raises(UsageError, match="--max-model-len is 513; the model allows at most 512"):
        module._max_model_len(made, 513)


def test_waiting_thread_gives_way_to_the_workers() -> None:
    """In the kernel's batch class while it waits, and back in its own whatever happens."""
    devices = DeviceSet(DeviceConfig(driver="local-task"), 1)
    with devices.given_way():
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    with pytest.raises(KeyError), devices.given_way():
        raise KeyError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    devices.close()


def test_local_sync_has_no_workers_to_give_way_to() -> None:
    devices = DeviceSet(DeviceConfig(driver="local-sync"), 1)
    with devices.given_way():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    devices.close()
