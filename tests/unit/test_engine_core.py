"""Requests through the engine, step by step: batching, caching, preemption, faults, aborts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine_driver import Answer, Driver, alone, make_request
from fake_runner import FakeRunner
from shark_llm.engine.core import EngineCore
from shark_llm.engine.request import ErrorEvent, Event, Request, SamplingParams
from shark_llm.engine.sampling import sample
from shark_llm.engine.settings import EngineSettings
from shark_llm.errors import UsageError
from shark_llm.runtime.runner import Phase, Row


def numbers(first: int, count: int) -> list[int]:
    return [token % 512 for token in range(first, first + count)]


def make_runner(**options: Any) -> FakeRunner:
    return FakeRunner(**({"num_pages": 64, "vocab_size": 512, "max_model_len": 400} | options))


def test_same_prompt_again_and_again() -> None:
    """E01: four times in sequence, then with the cache off: one text."""
    driver = Driver(make_runner())
    prompt = numbers(0, 40)
    answers = [driver.ask(prompt) for _ in range(4)]
    expected = alone(driver.runner, prompt).tokens
    assert [answer.tokens for answer in answers] == [expected] * 4
    assert [answer.finish.cached_tokens for answer in answers] == [0, 32, 32, 32]


def test_logits_of_greedy_requests_stay_on_the_device() -> None:
    """Only steps with a row that asks for more than the best token read any."""
    driver = Driver(make_runner())
    expected = driver.ask(numbers(0, 40)).tokens
    assert driver.runner.num_reads == 0
    asked = driver.ask(numbers(0, 40), logprobs=0, max_tokens=3)
    assert asked.tokens == expected[:3]
    assert driver.runner.num_reads == 3
    greedy = driver.add(numbers(100, 20), max_tokens=5)
    drawn = driver.add(numbers(200, 20), max_tokens=2, temperature=1.0, seed=1)
    driver.run()
    assert greedy.tokens == alone(driver.runner, numbers(100, 20), max_tokens=5).tokens
    assert len(drawn.tokens) == 2
    assert driver.runner.num_reads == 3 + 2


@pytest.mark.parametrize(
    ("params", "sums"),
    [
        ({}, 0),
        ({"temperature": 1.0}, 1),
        ({"temperature": 0.5, "top_p": 0.9}, 1),
        ({"temperature": 0.5, "top_k": 5}, 0),
        ({"temperature": 0.5, "min_p": 0.1}, 0),
        ({"temperature": 0.5, "min_p": 0.1, "top_p": 0.9}, 1),
        ({"temperature": 0.5, "presence_penalty": 1.0}, 1),
        ({"presence_penalty": 1.0}, 0),
        ({"logprobs": 1}, 1),
        ({"temperature": 1.0, "logprobs": 1}, 1),
        ({"temperature": 0.5, "logprobs": 1}, 2),
    ],
)
def test_the_device_adds_up_what_sampling_asks_for(params: dict[str, Any], sums: int) -> None:
    """Once in a step, and again where logprobs, of temperature 1, stand beside another one."""
    driver = Driver(make_runner())
    driver.ask(numbers(0, 40), **({"max_tokens": 3, "seed": 1} | params))
    assert driver.runner.num_sums == 3 * sums


def test_rows_of_several_temperatures_share_the_sums() -> None:
    """Each draws as it does alone, beside one with logprobs and one that takes the best."""
    driver = Driver(make_runner())
    asked: list[dict[str, Any]] = [
        {"temperature": 0.7, "top_p": 0.9, "seed": 1, "logprobs": 2},
        {"temperature": 1.5, "seed": 2},
        {"logprobs": 1},
        {},
    ]
    prompts = [numbers(100 * i, 20) for i in range(len(asked))]
    answers = [
        driver.add(prompt, max_tokens=5, **params)
        for prompt, params in zip(prompts, asked, strict=True)
    ]
    driver.run()
    for prompt, params, answer in zip(prompts, asked, answers, strict=True):
        expected = alone(driver.runner, prompt, max_tokens=5, **params)
        assert answer.tokens == expected.tokens
        assert answer.logprobs == expected.logprobs


def test_hit_and_miss_in_one_batch() -> None:
    """E02"""
    driver = Driver(make_runner())
    warm, cold = numbers(0, 40), numbers(100, 40)
    driver.ask(warm)
    hit, miss = driver.add(warm), driver.add(cold)
    driver.run()
    assert hit.tokens == alone(driver.runner, warm).tokens
    assert miss.tokens == alone(driver.runner, cold).tokens
    assert (hit.finish.cached_tokens, miss.finish.cached_tokens) == (32, 0)


def test_whole_prompt_cached() -> None:
    """E03: lengths 32 (twice), its first 16, then 31 and 33; something is always computed."""
    driver = Driver(make_runner())
    cached = []
    for length in (32, 32, 16, 31, 33):
        answer = driver.ask(numbers(0, length))
        assert answer.tokens == alone(driver.runner, numbers(0, length)).tokens
        cached.append(answer.finish.cached_tokens)
        assert answer.finish.cached_tokens < length
    assert cached == [0, 16, 0, 16, 32]


def test_ids_are_compared_whole() -> None:
    """E06: 65 and 321 agree in 8 bits; equal second pages need equal first ones."""
    driver = Driver(make_runner())
    driver.ask([65] * 20)
    assert driver.ask([321] * 20).finish.cached_tokens == 0
    driver.ask([*numbers(0, 16), *numbers(200, 20)])
    answer = driver.ask([*numbers(50, 16), *numbers(200, 20)])
    assert answer.finish.cached_tokens == 0


def test_numbers_add_up_when_idle() -> None:
    """E08, E10: after shared prefixes every page is free or cached, and counted once."""
    driver = Driver(make_runner(num_pages=20))
    for tail in range(8):
        driver.add([*numbers(0, 32), tail], max_tokens=4)
    driver.run()  # checks ownership after every step, and the sums at the end
    stats = driver.core.stats()
    assert stats.running == stats.waiting == stats.pages_held == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total == 19
    assert stats.requests_finished == {"length": 8}


def test_prompt_of_all_pages_fits() -> None:
    """E11: 8 pages, one of them scratch: 7 pages of prompt run, and a small one behind them."""
    driver = Driver(make_runner(num_pages=8))
    assert driver.core.max_model_len == 7 * 16 + 1
    big = driver.add(numbers(0, 112), max_tokens=1)
    small = driver.add(numbers(200, 3), max_tokens=2)
    driver.run()
    assert big.tokens == driver.runner.greedy(numbers(0, 112), 1)
    assert small.tokens == driver.runner.greedy(numbers(200, 3), 2)


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_nothing_but_time(caching: bool) -> None:
    """E14: penalties, seed, logprobs and usage of a request preempted twice; tokens come once."""
    sampling = {
        "max_tokens": 40,
        "temperature": 0.9,
        "top_p": 0.95,
        "frequency_penalty": 1.0,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logprobs": 2,
    }
    prompts = [numbers(40 * i, 9 + i) for i in range(4)]
    driver = Driver(
        make_runner(page_size=4, num_pages=16), enable_prefix_caching=caching, max_num_seqs=4
    )
    answers = [driver.add(prompt, seed=i, **sampling) for i, prompt in enumerate(prompts)]
    states = list(driver.scheduler.waiting)
    driver.run()
    assert max(state.num_preemptions for state in states) >= 2
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        expected = alone(driver.runner, prompt, seed=i, **sampling)
        assert answer.events[:-1] == expected.events[:-1]
        assert answer.finish.completion_tokens == 40
        assert answer.finish.prompt_tokens == len(prompt)
        assert answer.finish.cached_tokens == 0
    stats = driver.core.stats()
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.generation_tokens == 160


def test_prefix_of_an_earlier_prompt_hits() -> None:
    """E16"""
    driver = Driver(make_runner())
    driver.ask(numbers(0, 64))
    answer = driver.ask(numbers(0, 32))
    assert answer.finish.cached_tokens == 16
    assert answer.tokens == driver.runner.greedy(numbers(0, 32), 8)
    stats = driver.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (96, 16)


@pytest.mark.parametrize("chunk", [16, 32, 48, 400])
def test_chunk_sizes_do_not_change_the_text(chunk: int) -> None:
    """E17: here the model is exact, so the text must be equal for every length."""
    runner = make_runner(num_pages=200)
    driver = Driver(
        runner, max_num_seqs=1, max_num_batched_tokens=chunk + 1, enable_prefix_caching=False
    )
    for length in range(1, 101):
        prompt = numbers(3 * length, length)
        assert driver.ask(prompt, max_tokens=2).tokens == runner.greedy(prompt, 2)


def test_seed_does_not_depend_on_company() -> None:
    """A seeded request draws the same alone, in any row, with the cache warm."""
    driver = Driver(make_runner(), max_num_seqs=12)
    sampling = {"temperature": 1.0, "seed": 42, "max_tokens": 12}
    prompt = numbers(7, 35)
    expected = alone(driver.runner, prompt, **sampling).tokens
    assert driver.ask(prompt, **sampling).tokens == expected
    others = [driver.add(numbers(50 * i, 10 + i), temperature=1.0) for i in range(5)]
    seeded = driver.add(prompt, **sampling)
    others += [driver.add(numbers(50 * i, 10 + i), temperature=1.0) for i in range(5)]
    driver.run()
    assert seeded.tokens == expected
    assert seeded.finish.cached_tokens == 32
    assert all(len(other.tokens) == 8 for other in others)


def test_stop_tokens() -> None:
    """EOS and stop_token_ids end a request; the token is counted but not sent."""
    runner = make_runner(next_token=lambda history: len(history))
    driver = Driver(runner, eos_token_ids=[14, 20])
    answer = driver.ask(numbers(0, 10), max_tokens=30)
    assert answer.tokens == [10, 11, 12, 13]
    assert answer.finish.finish_reason == "stop"
    assert answer.finish.stop_token_id == 14
    assert answer.finish.completion_tokens == 5
    answer = driver.ask(numbers(0, 10), max_tokens=30, stop_token_ids=frozenset({12}))
    assert (answer.tokens, answer.finish.stop_token_id) == ([10, 11], 12)
    answer = driver.ask(numbers(0, 10), max_tokens=12, ignore_eos=True)
    assert answer.tokens == list(range(10, 22))
    assert answer.finish.finish_reason == "length"


def test_eos_cannot_come_before_min_tokens() -> None:
    runner = make_runner(next_token=lambda history: 14)
    driver = Driver(runner, eos_token_ids=[14])
    answer = driver.ask(numbers(0, 10), max_tokens=30, min_tokens=5)
    assert len(answer.tokens) == 5
    assert 14 not in answer.tokens
    assert answer.finish.finish_reason == "stop"


def test_prompt_logprobs() -> None:
    """D10: prompt of 5 ids, max_tokens 0: 5 entries, the first None, others as log softmax says."""
    driver = Driver(make_runner())
    prompt = numbers(3, 5)
    answer = driver.ask(prompt, max_tokens=0, prompt_logprobs=1)
    scores = answer.prompt_logprobs
    assert answer.tokens == []
    assert answer.finish.finish_reason == "length"
    assert answer.finish.completion_tokens == 0
    assert scores[0] is None
    assert len(scores) == 5
    for i in range(1, 5):
        logits = driver.runner.logits_after(prompt[:i]).astype(np.float64)
        reference = logits - np.log(np.exp(logits).sum())
        assert scores[i].logprob == pytest.approx(reference[prompt[i]], abs=1e-4)
        assert scores[i].top[0][0] == reference.argmax()


def test_a_prompt_one_longer_than_the_pages_is_scored() -> None:
    """Its last token is never read, so it was accepted; its page did not exist, so it could not be
    admitted, and the engine thread ended for everybody."""
    driver = Driver(make_runner(num_pages=5))
    assert driver.core.max_model_len == 65
    small = driver.add(numbers(0, 20))
    answer = driver.add(numbers(100, 65), max_tokens=0, prompt_logprobs=1)
    driver.run()
    assert len(answer.prompt_logprobs) == 65
    assert answer.finish.finish_reason == "length"
    assert small.tokens == alone(driver.runner, numbers(0, 20)).tokens


def test_an_eos_id_beyond_the_vocabulary_hurts_nobody() -> None:
    """min_tokens wanted to ban it, outside the row of logits: the engine thread ended."""
    driver = Driver(make_runner(), eos_token_ids=(5, 512, 10**6))
    answer = driver.ask(numbers(0, 20), min_tokens=3)
    assert len(answer.tokens) >= 3
    assert driver.core.eos_token_ids == {5}


def test_a_fault_while_sampling_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of our own in one request's parameters may not end the others'."""

    def broken(logits: Any, best: int, state: Any) -> Any:
        if state.params.top_k == 7:
            raise IndexError("a bug")
        return sample(logits, best, state)

    monkeypatch.setattr("shark_llm.engine.core.sample", broken)
    driver = Driver(make_runner())
    good = driver.add(numbers(0, 20))
    bad = driver.add(numbers(50, 20), top_k=7)
    driver.run()
    assert bad.error.code == "internal_error"
    assert "a bug" not in bad.error.message
    assert good.tokens == alone(driver.runner, numbers(0, 20)).tokens


@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
def test_prompt_logprobs_then_text(length: int) -> None:
    driver = Driver(make_runner())
    prompt = numbers(3, length)
    plain = driver.ask(prompt)
    answer = driver.ask(prompt, prompt_logprobs=0)
    assert len(answer.prompt_logprobs) == length
    assert answer.tokens == plain.tokens
    assert not answer.events[0].is_terminal
    assert answer.finish.cached_tokens == 0


def test_prompt_logprobs_survive_preemption() -> None:
    driver = Driver(make_runner(page_size=4, num_pages=13), max_num_seqs=3)
    prompts = [numbers(40 * i, 12) for i in range(3)]
    answers = [driver.add(p, prompt_logprobs=1, max_tokens=20) for p in prompts]
    driver.run()
    assert driver.core.stats().preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = alone(driver.runner, prompt, prompt_logprobs=1, max_tokens=20)
        assert answer.events[:-1] == expected.events[:-1]


def test_nothing_to_do_ends_at_once() -> None:
    driver = Driver(make_runner())
    answer = driver.add(numbers(0, 4), max_tokens=0)
    assert answer.finish.finish_reason == "length"
    assert driver.core.stats().steps == 0
    answer = driver.ask([5], max_tokens=0, prompt_logprobs=3)
    assert answer.prompt_logprobs == (None,)


def test_more_rows_than_the_largest_batch() -> None:
    driver = Driver(make_runner(record=True), max_num_seqs=20)
    prompts = [numbers(20 * i, 5) for i in range(20)]
    answers = [driver.add(prompt) for prompt in prompts]
    driver.run()
    assert [a.tokens for a in answers] == [driver.runner.greedy(p, 8) for p in prompts]
    assert {8, 4} <= set(driver.core.stats().decode_batches)


def test_failed_forward_ends_its_rows_only() -> None:
    """D17: the others live, no page is lost, nothing of the failed pages is reused."""

    def fault(index: int, phase: Phase, rows: Sequence[Row]) -> None:
        if phase == "prefill" and any(row.tokens[0] == 300 for row in rows):
            raise RuntimeError("injected")

    driver = Driver(make_runner(on_forward=fault))
    good = driver.add(numbers(0, 20), max_tokens=20)
    driver.step(3)
    bad = driver.add(numbers(300, 40))
    driver.run()
    assert bad.error.code == "forward_failed"
    assert "injected" not in bad.error.message
    assert good.tokens == driver.runner.greedy(numbers(0, 20), 20)
    assert driver.core.failure is None
    driver.runner.on_forward = None
    again = driver.ask(numbers(300, 40))
    assert again.finish.cached_tokens == 0
    assert again.tokens == driver.runner.greedy(numbers(300, 40), 8)


def test_failures_in_a_row_kill_the_engine() -> None:
    def fault(index: int, phase: Phase, rows: Sequence[Row]) -> None:
        raise RuntimeError("device lost")

    driver = Driver(make_runner(on_forward=fault), max_consecutive_failures=3, max_num_seqs=1)
    answers = [driver.add(numbers(10 * i, 5)) for i in range(5)]
    driver.step(3)
    codes = [answer.error.code for answer in answers]
    assert codes == ["forward_failed"] * 3 + ["engine_dead"] * 2
    assert driver.core.failure == ("the device failed 3 times in a row, last with RuntimeError")
    late = driver.add(numbers(0, 5))
    assert late.error.code == "engine_dead"


def test_a_good_forward_resets_the_count() -> None:
    def fault(index: int, phase: Phase, rows: Sequence[Row]) -> None:
        if index % 2:
            raise RuntimeError("every other")

    driver = Driver(make_runner(on_forward=fault), max_consecutive_failures=2)
    for i in range(6):
        driver.ask(numbers(10 * i, 5))
    assert driver.core.failure is None


def test_nan_ends_its_own_request() -> None:
    """D18: logits that are not finite are an error of that request; nothing of it is cached."""
    driver = Driver(make_runner(nan=lambda row: 300 in row.tokens))
    good = driver.add(numbers(0, 20))
    bad = driver.add([*numbers(100, 20), 300, 1])
    driver.run()
    assert bad.error.code == "invalid_logits"
    assert good.tokens == driver.runner.greedy(numbers(0, 20), 8)
    assert driver.ask([*numbers(100, 20), 1]).finish.cached_tokens == 0


def test_nan_in_the_middle_of_a_prompt_is_noticed() -> None:
    driver = Driver(make_runner(nan=lambda row: 300 in row.tokens), max_num_batched_tokens=32)
    bad = driver.ask([*numbers(100, 5), 300, *numbers(0, 60)])
    assert bad.error.code == "invalid_logits"
    assert driver.core.stats().pages_cached == 0


@pytest.mark.parametrize("last", [False, True])
def test_sink_that_raises_hurts_nobody_else(last: bool) -> None:
    driver = Driver(make_runner())
    good = driver.add(numbers(0, 20))
    events: list[Event] = []

    def sink(event: Event) -> None:
        events.append(event)
        if event.is_terminal == last:
            raise RuntimeError("reader is gone")

    driver.core.add(
        Request(
            request_id="bad",
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=2, temperature=0),
            sink=sink,
        )
    )
    driver.run()
    assert good.tokens == driver.runner.greedy(numbers(0, 20), 8)
    assert [event.is_terminal for event in events].count(True) == 1
    assert events[-1].is_terminal


def test_sink_that_missed_a_token_is_told_so() -> None:
    """A sink that raised on its first token saw a normal end after its second, which it missed."""
    driver = Driver(make_runner())
    events: list[Event] = []

    def sink(event: Event) -> None:
        events.append(event)
        if len(events) == 1:
            raise RuntimeError("reader is gone")

    driver.core.add(
        Request(
            request_id="bad",
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=2, temperature=0),
            sink=sink,
        )
    )
    while driver.core.has_requests:
        driver.core.step()  # the first token is sent in the second step, which draws the last one
    assert len(events) == 2
    assert events[1] == ErrorEvent(
        message="the receiver of this request's tokens failed", code="sink_failed"
    )


def test_fifty_aborts_at_every_step() -> None:
    """Abort while waiting, in prefill and in decode: the page count returns to where it began."""
    for step in range(14):
        driver = Driver(
            make_runner(page_size=4, num_pages=60), max_num_seqs=5, max_num_batched_tokens=24
        )
        keep = driver.add(numbers(0, 10), max_tokens=30)
        answers = [driver.add(numbers(8 * i, 9 + i % 7), max_tokens=20) for i in range(50)]
        driver.step(step)
        for i, answer in enumerate(answers):
            driver.abort(i + 1)
            if answer.done:
                assert answer.finish.finish_reason in ("abort", "length")
        assert all(answer.done for answer in answers)
        assert driver.core.check_integrity() == []
        driver.abort(1)  # long gone
        driver.run()
        assert keep.tokens == driver.runner.greedy(numbers(0, 10), 30)
        stats = driver.core.stats()
        assert stats.pages_free + stats.pages_evictable == stats.pages_total


def test_breach_lets_running_streams_end_and_starts_nothing() -> None:
    """E10: the check never ends the process, nor anybody's running stream."""
    driver = Driver(make_runner(), max_num_seqs=1)
    first = driver.add(numbers(0, 20), max_tokens=6)
    second = driver.add(numbers(100, 20))
    driver.core.step()
    driver.scheduler.pool.free([driver.scheduler.pool.free_pages()[0]])
    while driver.core.has_requests:
        driver.core.step()
    assert first.tokens == driver.runner.greedy(numbers(0, 20), 6)
    assert second.error.code == "integrity_breach"
    assert driver.core.breach is not None
    assert "was returned but nobody had it" in driver.core.breach
    assert driver.add(numbers(0, 3)).error.code == "integrity_breach"


def test_integrity_check_sees_what_it_should() -> None:
    driver = Driver(make_runner(page_size=4))
    driver.add(numbers(0, 22), max_tokens=30)
    driver.core.step()
    scheduler = driver.scheduler
    (state,) = scheduler.running
    page = state.pages.pop()
    assert any("belong to nobody" in problem for problem in scheduler.check_integrity())
    state.pages.append(scheduler.pool.free_pages()[0])
    assert any("belongs to the free list and" in p for p in scheduler.check_integrity())
    state.pages[-1] = page
    assert scheduler.check_integrity() == []
    state.node.lock_count += 1
    assert any("locks" in problem for problem in scheduler.check_integrity())
    state.node.lock_count -= 1
    state.pages[0], state.pages[1] = state.pages[1], state.pages[0]
    assert any("reads other pages" in problem for problem in scheduler.check_integrity())


def test_the_device_waits_for_the_host_only_while_there_is_work() -> None:
    """What lies between two steps counts as waiting; what lies between two requests does not."""
    driver = Driver(FakeRunner(step_seconds=0.004))
    driver.add([1, 2, 3], max_tokens=4)
    driver.add([4, 5, 6], max_tokens=8)
    driver.core.step()
    time.sleep(0.05)
    driver.run()
    stats = driver.core.stats()
    assert stats.forward_seconds == driver.runner.device_seconds >= stats.steps * 0.004
    assert stats.step_seconds >= stats.forward_seconds + 0.05
    assert 0.05 / stats.step_seconds <= stats.device_wait < 1
    driver.add([7, 8], max_tokens=2)
    driver.step()
    driver.abort(2)  # busy until here, as far as the last step knows
    time.sleep(0.2)
    driver.ask([9], max_tokens=2)
    assert driver.core.stats().step_seconds < stats.step_seconds + 0.2


def test_timings() -> None:
    driver = Driver(make_runner(), max_num_seqs=1)
    driver.ask(numbers(0, 5))
    aborted = driver.add(numbers(0, 5))
    driver.abort(1)
    timings = aborted.finish.timings
    assert timings is not None
    assert timings.admitted is timings.first_token is None
    timings = driver.ask(numbers(0, 5)).finish.timings
    assert timings is not None
    assert timings.admitted is not None
    assert timings.first_token is not None
    assert timings.submitted <= timings.admitted <= timings.first_token <= timings.finished


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"scheduling_policy": "sjf"}, "scheduling_policy is 'sjf'; it must be one of fcfs, lpm"),
        (
            {"max_num_seqs": 16, "max_num_batched_tokens": 31},
            "max_num_batched_tokens is 31; it must be at least max_num_seqs + page_size = 32, "
            "or prefill would starve beside full decodes",
        ),
        (
            {"max_model_len": 401},
            "max_model_len is 401; the compiled module allows 400 tokens and the 63 pages of the "
            "KV cache hold 1008: lower it, or give the cache more pages",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        EngineCore(make_runner(), EngineSettings(**settings), eos_token_ids=())
    assert str(error.value) == message


def test_max_model_len_ends_no_request_early() -> None:
    driver = Driver(make_runner(), max_model_len=30)
    answer = Answer()
    driver.core.add(make_request("x", numbers(0, 20), answer, max_tokens=10))
    driver.run()
    assert answer.finish.completion_tokens == 10
