"""What runs when, and who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest

from engine_driver import Answer, Driver
from fake_runner import FakeRunner
from shark_llm.engine.batching import decode_groups, prefill_groups
from shark_llm.engine.scheduler import ScheduledRow

PAGE = 4


def make_driver(
    *, num_pages: int = 65, prefill_batch_sizes: tuple[int, ...] = (1, 4), **settings: Any
) -> Driver:
    runner = FakeRunner(
        page_size=PAGE,
        num_pages=num_pages,
        vocab_size=512,
        max_model_len=200,
        prefill_batch_sizes=prefill_batch_sizes,
        record=True,
    )
    return Driver(runner, **({"max_num_batched_tokens": 64} | settings))


def numbers(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def step_calls(driver: Driver) -> list[tuple[str, int, int]]:
    """(phase, start, tokens) of each row that one step ran."""
    driver.runner.calls.clear()
    driver.step()
    return [
        (phase, row.start, len(row.tokens)) for phase, rows in driver.runner.calls for row in rows
    ]


def running(driver: Driver) -> list[str]:
    return [state.request.request_id for state in driver.scheduler.running]


def waiting(driver: Driver) -> list[str]:
    return [state.request.request_id for state in driver.scheduler.waiting]


def test_prefill_goes_in_chunks_beside_running_decodes() -> None:
    driver = make_driver(max_num_seqs=4, max_num_batched_tokens=15)
    short = driver.add(numbers(0, 3), max_tokens=20)
    assert step_calls(driver) == [("prefill", 0, 3)]
    long = driver.add(numbers(100, 30), max_tokens=2)
    # 15 - 1 decode = 14 tokens are 3 pages; the last chunk takes what is left.
    assert step_calls(driver) == [("decode", 3, 1), ("prefill", 0, 12)]
    assert step_calls(driver) == [("decode", 4, 1), ("prefill", 12, 12)]
    assert step_calls(driver) == [("decode", 5, 1), ("prefill", 24, 6)]
    assert sorted(step_calls(driver)) == [("decode", 6, 1), ("decode", 30, 1)]
    assert long.tokens == driver.runner.greedy(numbers(100, 30), 2)
    driver.run()
    assert short.tokens == driver.runner.greedy(numbers(0, 3), 20)


def test_several_prompts_share_a_step() -> None:
    driver = make_driver(max_num_seqs=8, max_num_batched_tokens=24)
    for i in range(4):
        driver.add(numbers(50 * i, 7))
    # 24 tokens: 7 + 7 + 7, and 3 are less than a page.
    assert sorted(step_calls(driver)) == [("prefill", 0, 7)] * 3
    assert running(driver) == ["r0", "r1", "r2"]


def test_one_remaining_token_runs_as_decode() -> None:
    """E03: a prompt of 2 pages + 1 token whose pages are cached computes just that token."""
    driver = make_driver()
    driver.ask(numbers(0, 9))
    driver.runner.calls.clear()
    answer = driver.ask(numbers(0, 9))
    assert driver.runner.calls[0][0] == "decode"
    assert driver.runner.calls[0][1][0].start == 8
    assert answer.finish.cached_tokens == 8


def test_request_is_admitted_only_with_pages_for_its_whole_prompt() -> None:
    driver = make_driver(num_pages=6)  # 5 pages
    driver.add(numbers(0, 12), max_tokens=3)  # 3 pages, then a fourth
    driver.add(numbers(100, 8), max_tokens=3)  # 2 pages: would fit, but r0 needs its next one
    driver.step()
    assert running(driver) == ["r0"]
    driver.run()


def test_youngest_is_preempted_when_pages_run_out() -> None:
    driver = make_driver(num_pages=8, enable_prefix_caching=False)  # 7 pages
    old = driver.add(numbers(0, 8), max_tokens=12)  # 2 pages, grows to 5
    young = driver.add(numbers(100, 8), max_tokens=12)
    seen_waiting = set()
    while driver.core.has_requests:
        driver.step()
        seen_waiting.update(waiting(driver))
    assert driver.core.stats().preemptions >= 1
    assert seen_waiting == {"r1"}
    assert old.tokens == driver.runner.greedy(numbers(0, 8), 12)
    assert young.tokens == driver.runner.greedy(numbers(100, 8), 12)
    assert young.finish.completion_tokens == 12
    assert young.finish.prompt_tokens == 8


def test_preempted_request_comes_before_all_that_wait() -> None:
    driver = make_driver(num_pages=8, max_num_seqs=3)
    driver.add(numbers(0, 8), max_tokens=12)
    driver.add(numbers(100, 8), max_tokens=12)
    while not driver.core.stats().preemptions:
        driver.step()
    driver.add(numbers(200, 4), max_tokens=1)
    assert waiting(driver) == ["r1", "r2"]
    driver.step()
    assert waiting(driver)[:1] == ["r1"]
    driver.run()


def test_cached_pages_go_before_anybody_is_preempted() -> None:
    driver = make_driver(num_pages=9)
    driver.ask(numbers(300, 15), max_tokens=1)  # leaves 3 cached pages
    assert driver.core.stats().pages_cached == 3
    driver.add(numbers(0, 8), max_tokens=12)
    driver.run()
    assert driver.core.stats().preemptions == 0


def test_own_eviction_never_frees_matched_pages() -> None:
    """A request that hits the cache and needs all other pages must not evict what it matched."""
    driver = make_driver(num_pages=7)  # 6 pages
    driver.ask(numbers(0, 13), max_tokens=1)  # 3 cached
    driver.ask(numbers(100, 9), max_tokens=1)  # 2 cached, more recently used
    answer = driver.ask(numbers(0, 22), max_tokens=2)  # 3 matched + 3 of the rest
    assert answer.finish.cached_tokens == 12
    assert answer.tokens == driver.runner.greedy(numbers(0, 22), 2)


def test_fcfs_admits_in_order_and_the_head_blocks() -> None:
    driver = make_driver(num_pages=8)  # 7 pages
    driver.add(numbers(0, 16), max_tokens=6)
    driver.add(numbers(100, 20), max_tokens=2)  # 5 pages: not beside r0
    driver.add(numbers(200, 3), max_tokens=2)
    driver.step()
    assert running(driver) == ["r0"]
    assert waiting(driver) == ["r1", "r2"]
    driver.run()


def test_lpm_admits_the_longest_cached_prefix_first() -> None:
    driver = make_driver(max_num_seqs=1, scheduling_policy="lpm")
    driver.ask(numbers(0, 20), max_tokens=1)
    driver.add(numbers(300, 20), max_tokens=1)
    driver.add([*numbers(0, 8), 400, 401], max_tokens=1)
    driver.add([*numbers(0, 16), 400, 401], max_tokens=1)
    order = []
    while driver.core.has_requests:
        before = set(waiting(driver))
        driver.step()
        order += sorted(before - set(waiting(driver)))
    assert order == ["r3", "r2", "r1"]


@pytest.mark.parametrize("bound", [0, 3])
def test_lpm_overtaking_is_bounded(bound: int) -> None:
    """E13: a request without a prefix waits for at most `max_overtakes` later arrivals."""
    driver = make_driver(max_num_seqs=1, scheduling_policy="lpm", max_overtakes=bound)
    driver.ask(numbers(0, 20), max_tokens=1)
    driver.add(numbers(300, 20), max_tokens=1)
    overtakers: list[Answer] = []
    while "r1" in waiting(driver):
        overtakers.append(driver.add([*numbers(0, 12), 400 + len(overtakers)], max_tokens=1))
        driver.add([*numbers(0, 12), 450], max_tokens=1)
        driver.step()
    assert sum(answer.done for answer in overtakers) <= bound
    driver.run()


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_big_and_small_requests_wait_a_bounded_time(policy: str) -> None:
    """E13: 1 request of 6 pages while 20 small ones arrive all the time, in 8 pages."""
    driver = make_driver(num_pages=9, max_num_seqs=4, scheduling_policy=policy, max_overtakes=5)
    answers = [driver.add(numbers(10 * i, 5), max_tokens=4) for i in range(6)]
    big = driver.add(numbers(300, 23), max_tokens=2)
    steps = 0
    while not big.done:
        # The 6 before it, and at most 5 later ones, each alive for 4 steps: 44, in ones at worst.
        assert steps < 48
        answers.append(driver.add(numbers(5 * steps, 5), max_tokens=4))
        driver.step()
        steps += 1
    small_waited = 0
    last = answers[-1]
    while not last.done:
        driver.step()
        small_waited += 1
    assert small_waited <= 4 * len(answers)
    driver.run()
    assert big.tokens == driver.runner.greedy(numbers(300, 23), 2)


def test_common_prefix_of_simultaneous_requests_is_computed_once() -> None:
    driver = make_driver(max_num_seqs=8, max_num_batched_tokens=200)
    prompts = [[*numbers(0, 24), 100 + i, 101 + i] for i in range(6)]
    answers = [driver.add(prompt, max_tokens=3) for prompt in prompts]
    driver.run()
    computed = sum(
        len(row.tokens) for phase, rows in driver.runner.calls for row in rows if phase == "prefill"
    )
    assert computed == 26 + 5 * 2
    assert [a.finish.cached_tokens for a in answers] == [0, 24, 24, 24, 24, 24]
    assert [a.tokens for a in answers] == [driver.runner.greedy(p, 3) for p in prompts]


def test_short_common_prefix_makes_nobody_wait() -> None:
    driver = make_driver(max_num_seqs=8)
    for i in range(3):
        driver.add([*numbers(0, 4), *numbers(100 + 20 * i, 12)])
    driver.step()
    assert waiting(driver) == []


def test_finished_requests_leave_their_output_in_the_cache() -> None:
    """E16: the next turn of a conversation finds prompt and answer."""
    driver = make_driver()
    first = driver.ask(numbers(0, 10), max_tokens=11)
    turn = [*numbers(0, 10), *first.tokens, 7, 8, 9]
    second = driver.ask(turn, max_tokens=4)
    assert second.finish.cached_tokens == 20  # 21 tokens, of which the last was never computed
    assert second.tokens == driver.runner.greedy(turn, 4)


def test_prefix_cache_off_shares_nothing() -> None:
    driver = make_driver(enable_prefix_caching=False)
    driver.ask(numbers(0, 20))
    answer = driver.ask(numbers(0, 20))
    assert answer.finish.cached_tokens == 0
    assert driver.core.stats().pages_cached == 0


def test_decode_rows_fill_the_largest_batches_first() -> None:
    rows = [ScheduledRow(None, i, i + 1) for i in range(19)]  # type: ignore[arg-type]
    assert [len(group) for group in decode_groups(rows, (1, 4, 8))] == [8, 8, 3]
    assert decode_groups([], (1, 4)) == []


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([16], [[16]]),
        ([128, 128, 128, 128], [[128, 128, 128, 128]]),
        ([128, 128], [[128], [128]]),  # padding to 4 rows would compute 256 more
        ([512, 16, 16, 16, 16], [[512], [16, 16, 16, 16]]),
        ([16, 512, 480, 496, 500], [[512, 500, 496, 480], [16]]),
        ([16, 16, 16], [[16, 16, 16]]),  # one padded row costs less than two more forwards
        ([], []),
    ],
)
def test_prefill_rows_are_grouped_by_length(lengths: list[int], groups: list[list[int]]) -> None:
    rows = [ScheduledRow(None, 0, length) for length in lengths]  # type: ignore[arg-type]
    result = prefill_groups(rows, (1, 4), 16)
    assert [[row.end for row in group] for group in result] == groups
