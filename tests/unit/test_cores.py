"""The cores of this CPU are dealt out to the ranks; their workers stay on the process's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shark_llm.errors import UsageError
from shark_llm.runtime import cores
from shark_llm.runtime.cores import (
    confined_to,
    cpus_around,
    share_cores,
    unpin_workers,
    usable_cores,
)
from shark_llm.runtime.devices import DeviceConfig, DeviceSet

FOUR = [(0, 4), (1, 5), (2, 6), (3, 7)]  # cores of two hyperthreads each


def worker_cpus(wanted: int) -> list[frozenset[int]]:
    """The CPUs that each of IREE's `wanted` workers may run on; they are named as they start."""
    found: list[frozenset[int]] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = [
            frozenset(os.sched_getaffinity(int(task.name)))
            for task in Path("/proc/self/task").iterdir()
            if (task / "comm").read_text().startswith("iree-worker")
        ]
        if len(found) == wanted:
            break
        time.sleep(0.01)
    return sorted(found, key=sorted)


@pytest.fixture
def cpus() -> Iterator[list[int]]:
    """The first CPU of each core of this machine, at most two; this thread's own set at the end."""
    before = os.sched_getaffinity(0)
    yield [core[0] for core in usable_cores()][:2]
    os.sched_setaffinity(0, before)


def test_shares_are_whole_neighbouring_cores() -> None:
    assert share_cores(FOUR, 1, 4) == [FOUR]
    assert share_cores(FOUR, 2, 4) == [FOUR[:2], FOUR[2:]]
    assert share_cores(FOUR, 3, 4) == [FOUR[:1], FOUR[1:2], FOUR[2:]]
    assert share_cores(FOUR, 2, 3) == [FOUR[:1], FOUR[1:3]]


def test_more_threads_than_cores_share_them() -> None:
    assert share_cores(FOUR, 2, 6) == [FOUR[:3], [FOUR[2], FOUR[3], FOUR[0]]]
    assert share_cores(FOUR, 2, 8) == [FOUR, FOUR[2:] + FOUR[:2]]
    assert share_cores(FOUR[:2], 5, 9) == [[FOUR[0]]] * 3 + [[FOUR[1]]] * 2


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_rank_has_a_core_and_every_core_a_rank(count: int, ranks: int) -> None:
    made = [(cpu,) for cpu in range(count)]
    shares = share_cores(made, ranks, count)
    assert len(shares) == ranks
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert {core for share in shares for core in share} == set(made)
    if count >= ranks:
        assert sum(sizes) == count


@pytest.fixture
def two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As numbered by machines that count all cores of all sockets first, then their siblings."""
    for cpu, (socket, siblings) in enumerate(
        [("0", "0,4"), ("1", "1,5"), ("0", "2,6"), ("1", "3,7")] * 2
    ):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket}\n")
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(cores, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)) - {6})


@pytest.mark.usefixtures("two_sockets")
def test_hyperthreads_are_one_core_and_sockets_stay_together() -> None:
    assert usable_cores() == [(0, 4), (2,), (1, 5), (3, 7)]


@pytest.mark.usefixtures("two_sockets")
def test_workers_keep_to_the_sockets_of_their_share() -> None:
    found = usable_cores()
    first, second = share_cores(found, 2, len(found))
    assert cpus_around(first, found) == {0, 4, 2}
    assert cpus_around(second[1:], found) == {1, 5, 3, 7}
    assert cpus_around(found[1:3], found) == set(range(8)) - {6}


def test_confinement_ends_with_its_block() -> None:
    before = os.sched_getaffinity(0)
    first = usable_cores()[0]
    with confined_to([first]):
        assert os.sched_getaffinity(0) == set(first)
    assert os.sched_getaffinity(0) == before
    with pytest.raises(KeyError), confined_to([first]):
        raise KeyError
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("tp", [1, 2, 3, 5, 8])
def test_devices_divide_the_cores_between_them(cpus: list[int], tp: int) -> None:
    """Not a worker on each core for each device: tp x cores threads slowed all of them down."""
    os.sched_setaffinity(0, cpus)
    devices = DeviceSet(DeviceConfig(driver="local-task"), tp)
    found = worker_cpus(max(tp, len(cpus)))
    devices.close()
    assert len(found) == max(tp, len(cpus))
    assert frozenset().union(*found) == set(cpus)
    assert all(len(of_one) == 1 for of_one in found)


@pytest.mark.parametrize("tp", [1, 3])
def test_workers_that_have_begun_may_use_every_core(cpus: list[int], tp: int) -> None:
    """Pinned, each waited for whatever else ran on its core: steps took three times as long."""
    os.sched_setaffinity(0, cpus)
    devices = DeviceSet(DeviceConfig(driver="local-task"), tp)
    count = max(tp, len(cpus))
    assert {len(of_one) for of_one in worker_cpus(count)} == {1}
    devices.unpin_workers()
    found = worker_cpus(count)
    devices.close()
    assert found == [frozenset(cpus)] * count


def test_only_workers_are_unpinned_and_one_that_has_ended_is_no_error(cpus: list[int]) -> None:
    os.sched_setaffinity(0, cpus[:1])
    unpin_workers([threading.get_native_id(), 2**30], frozenset(cpus))
    assert os.sched_getaffinity(0) == {cpus[0]}


def test_workers_stay_where_this_process_may_run(cpus: list[int]) -> None:
    """A worker count of one's own left the CPUs that taskset allows: IREE unpins such workers."""
    last = cpus[-1]
    os.sched_setaffinity(0, {last})
    devices = DeviceSet(DeviceConfig(driver="local-task", cpu_threads=1), 1)
    found = worker_cpus(1)
    devices.unpin_workers()
    found += worker_cpus(1)
    devices.close()
    assert found == [frozenset({last})] * 2


@pytest.mark.parametrize(
    ("threads", "tp", "message"),
    [
        (1, 2, "--cpu-threads is 1, the bundle has tp 2: every rank needs a thread, give at least"),
        (4000, 2, r"--cpu-threads is 4000, .* on \d+ cores: with tp 2, give at most \d+, a thread"),
    ],
)
def test_thread_count_must_suit_ranks_and_cores(threads: int, tp: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DeviceSet(DeviceConfig(driver="local-task", cpu_threads=threads), tp)
