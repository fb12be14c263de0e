"""The engine's thread: submit, abort, drain, stop, from other threads."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from engine_driver import Answer, make_request
from fake_runner import FakeRunner
from shark_llm.engine.loop import Engine
from shark_llm.engine.request import Event, FinishEvent, Request, SamplingParams
from shark_llm.engine.settings import EngineSettings
from shark_llm.errors import RequestError
from shark_llm.runtime.runner import Phase, Row
from shark_llm.server.metrics import Metrics

PATIENCE = 20.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def numbers(first: int, count: int) -> list[int]:
    return [token % 256 for token in range(first, first + count)]


class Gate:
    """Lets a runner's forwards through one by one."""

    def __init__(self) -> None:
        self.passes = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)

    def __call__(self, index: int, phase: Phase, rows: Sequence[Row]) -> None:
        self.arrived.release()
        assert self.passes.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self.passes.release(100_000)


@pytest.fixture
def engines() -> Iterator[Callable[..., tuple[Engine, FakeRunner]]]:
    """Makes started engines and stops them at the end."""
    made: list[tuple[Engine, FakeRunner]] = []

    def make(
        *, eos: Sequence[int] = (), start: bool = True, runner: Any = None, **settings: Any
    ) -> tuple[Engine, FakeRunner]:
        runner = FakeRunner(**(runner or {}))
        engine = Engine(
            runner,
            EngineSettings(**({"integrity_check_interval": 1} | settings)),
            eos_token_ids=eos,
        )
        if start:
            engine.start()
        made.append((engine, runner))
        return engine, runner

    yield make
    for engine, runner in made:
        if isinstance(runner.on_forward, Gate):
            runner.on_forward.open()
        engine.stop()
        assert runner.closed


def submit(engine: Engine, request_id: str, prompt: Sequence[int], **sampling: Any) -> Answer:
    answer = Answer()
    engine.submit(make_request(request_id, prompt, answer, **sampling))
    return answer


def test_requests_from_many_threads(engines: Any) -> None:
    engine, runner = engines(max_num_seqs=6, runner={"num_pages": 30})
    answers: dict[str, tuple[list[int], Answer]] = {}

    def client(number: int) -> None:
        for i in range(10):
            prompt = numbers(number * 7 + i, 3 + (number * i) % 40)
            name = f"{number}-{i}"
            answers[name] = (prompt, submit(engine, name, prompt, max_tokens=1 + i))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.drain(PATIENCE)
    for prompt, answer in answers.values():
        assert answer.tokens == runner.greedy(prompt, answer.finish.completion_tokens)
        assert answer.finish.finish_reason == "length"
    stats = engine.stats()
    assert stats.requests_accepted == 80
    assert stats.requests_finished == {"length": 80}


def test_submitted_before_start(engines: Any) -> None:
    engine, runner = engines(start=False)
    answer = submit(engine, "a", [1, 2, 3])
    assert engine.stats().waiting == 1
    engine.start()
    wait_for(lambda: answer.done)
    assert answer.tokens == runner.greedy([1, 2, 3], 8)


def test_abort_while_waiting_running_and_unknown(engines: Any) -> None:
    gate = Gate()
    engine, _ = engines(max_num_seqs=1, runner={"on_forward": gate})
    running = submit(engine, "running", numbers(0, 40), max_tokens=200)
    waiting = submit(engine, "waiting", numbers(0, 5))
    gate.arrived.acquire()
    gate.passes.release(3)
    assert engine.abort("waiting")
    wait_for(lambda: waiting.done)
    assert not running.done
    assert engine.abort("running")
    gate.passes.release(2)  # pages are back within two steps
    wait_for(lambda: running.done)
    wait_for(lambda: engine.stats().pages_held == 0)
    assert running.finish.finish_reason == waiting.finish.finish_reason == "abort"
    assert not engine.abort("running")
    assert not engine.abort("never heard of")


def test_queue_full(engines: Any) -> None:
    gate = Gate()
    engine, _ = engines(max_num_seqs=2, max_num_queued_requests=3, runner={"on_forward": gate})
    answers = [submit(engine, f"r{i}", numbers(i, 4)) for i in range(5)]
    with pytest.raises(RequestError) as error:
        submit(engine, "r5", numbers(0, 4))
    assert (error.value.status, error.value.code) == (503, "queue_full")
    assert str(error.value) == (
        "5 requests run or wait, and the queue holds at most 3 beyond the 2 that run; "
        "try again later"
    )
    gate.open()
    wait_for(lambda: all(answer.done for answer in answers))
    wait_for(lambda: submit_ok(engine))


def submit_ok(engine: Engine) -> bool:
    try:
        submit(engine, "again", numbers(0, 4))
    except RequestError:
        return False
    return True


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "message"),
    [
        ([], {}, "invalid_value", "the prompt is empty; it must have at least one token"),
        ([256], {}, "invalid_value", "prompt has the token id 256; the vocabulary ends at 255"),
        ([-1], {}, "invalid_value", "prompt has the token id -1; the vocabulary ends at 255"),
        (
            [1],
            {"logit_bias": {999999: 1.0}},
            "invalid_value",
            "logit_bias has the token id 999999; the vocabulary ends at 255",
        ),
        (
            [1],
            {"stop_token_ids": frozenset({10**9})},
            "invalid_value",
            "stop_token_ids has the token id 1000000000; the vocabulary ends at 255",
        ),
        ([1], {"max_tokens": -1}, "invalid_value", "max_tokens is -1; it must be at least 0"),
        (
            [1] * 100,
            {"max_tokens": 14},
            "context_length_exceeded",
            "the prompt has 100 tokens and max_tokens is 14, together 114; this server holds at "
            "most 113: shorten the prompt or lower max_tokens",
        ),
    ],
)
def test_what_can_never_run_is_refused(
    engines: Any, prompt: list[int], sampling: dict[str, Any], code: str, message: str
) -> None:
    """E11, D21, D22: refused at once with the limit, and the next request is served."""
    engine, runner = engines(runner={"num_pages": 8})
    with pytest.raises(RequestError) as error:
        submit(engine, "bad", prompt, **sampling)
    assert (error.value.status, error.value.code, str(error.value)) == (400, code, message)
    assert engine.max_model_len == 113
    good = submit(engine, "bad", [1] * 100, max_tokens=13)
    wait_for(lambda: good.done)
    assert good.tokens == runner.greedy([1] * 100, 13)


def test_request_id_in_use(engines: Any) -> None:
    gate = Gate()
    engine, _ = engines(runner={"on_forward": gate})
    answer = submit(engine, "twin", [1, 2])
    with pytest.raises(RequestError, match="request id 'twin' is in use; choose another"):
        submit(engine, "twin", [3])
    gate.open()
    wait_for(lambda: answer.done)


def test_drain_lets_streams_end_and_refuses_new_ones(engines: Any) -> None:
    engine, _ = engines(runner={"step_seconds": 0.002})
    answers = [submit(engine, f"r{i}", numbers(i, 4), max_tokens=30) for i in range(3)]
    assert not engine.drain(timeout=0.001)
    with pytest.raises(RequestError) as error:
        submit(engine, "late", [1])
    assert (error.value.status, error.value.code) == (503, "draining")
    assert engine.drain(PATIENCE)
    assert [answer.finish.completion_tokens for answer in answers] == [30] * 3
    assert engine.drain(0)


def test_stop_aborts_what_is_left(engines: Any) -> None:
    engine, runner = engines(max_num_seqs=1, runner={"step_seconds": 0.01})
    answers = [submit(engine, f"r{i}", numbers(i, 4), max_tokens=200) for i in range(3)]
    wait_for(lambda: len(answers[0].tokens) > 1)
    engine.stop()
    assert [answer.finish.finish_reason for answer in answers] == ["abort"] * 3
    assert runner.closed
    assert not engine.alive
    assert engine.stats().pages_held == 0
    with pytest.raises(RequestError, match="shutting down"):
        submit(engine, "late", [1])
    engine.stop()


def test_stop_without_start(engines: Any) -> None:
    engine, runner = engines(start=False)
    answer = submit(engine, "a", [1])
    engine.stop()
    assert answer.finish.finish_reason == "abort"
    assert runner.closed


def test_dead_engine_ends_everything_once(engines: Any) -> None:
    """Every accepted request gets one terminal event, later ones a 503."""

    def fault(index: int, phase: Phase, rows: Sequence[Row]) -> None:
        if index > 3:
            raise RuntimeError("device lost")

    engine, runner = engines(max_num_seqs=2, runner={"on_forward": fault}, start=False)
    answers = [submit(engine, f"r{i}", numbers(i, 4), max_tokens=50) for i in range(9)]
    assert engine.healthy
    engine.start()
    wait_for(lambda: not engine.alive)
    codes = {answer.error.code for answer in answers}
    assert codes == {"forward_failed", "engine_dead"}
    assert not engine.healthy
    assert engine.failure == ("the device failed 3 times in a row, last with RuntimeError")
    assert runner.closed
    with pytest.raises(RequestError) as error:
        submit(engine, "late", [1])
    assert (error.value.status, error.value.code) == (503, "engine_dead")
    assert engine.drain(0)


def test_fault_of_our_own_leaves_nobody_waiting(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = engines(start=False)
    answers = [submit(engine, f"r{i}", numbers(i, 4)) for i in range(3)]
    monkeypatch.setattr(engine._core.scheduler, "plan", lambda: 1 / 0)
    engine.start()
    wait_for(lambda: not engine.alive)
    assert [answer.error.code for answer in answers] == ["engine_dead"] * 3
    assert engine.failure == "the engine failed with ZeroDivisionError"


def test_breach_shows_in_health_and_metrics(engines: Any) -> None:
    """E10: new work is refused, the running stream ends by itself, the thread lives."""
    gate = Gate()
    engine, runner = engines(max_num_seqs=1, runner={"on_forward": gate})
    answer = submit(engine, "a", numbers(0, 20))
    gate.arrived.acquire()
    pool = engine._core.scheduler.pool
    pool.free([pool.free_pages()[0]])
    gate.open()
    wait_for(lambda: answer.done)
    assert answer.tokens == runner.greedy(numbers(0, 20), 8)
    wait_for(lambda: not engine.healthy)
    assert engine.alive
    assert "page ownership is broken" in str(engine.failure)
    wait_for(lambda: not engine.stats().healthy)
    metrics = Metrics("m")
    metrics.watch(engine.stats)
    assert b'shark_engine_healthy{model_name="m"} 0.0' in metrics.render()
    with pytest.raises(RequestError, match="takes no requests"):
        submit(engine, "b", [1])


def test_idle_engine_burns_no_cpu(engines: Any) -> None:
    """An idle server of the lineage burnt a whole core."""
    engine, _ = engines()
    answer = submit(engine, "a", [1, 2, 3])
    wait_for(lambda: answer.done)
    steps = engine.stats().steps
    wait_for(lambda: engine.stats().running == 0)
    began, began_cpu = time.monotonic(), time.process_time()
    time.sleep(0.3)
    used = (time.process_time() - began_cpu) / (time.monotonic() - began)
    assert used < 0.1
    assert engine.stats().steps - steps <= 1


def test_sink_may_submit_and_abort(engines: Any) -> None:
    """The engine holds no lock while it calls a sink."""
    engine, runner = engines()
    second = Answer()

    def sink(event: Event) -> None:
        if event.is_terminal:
            engine.submit(make_request("second", [4, 5], second))
        else:
            engine.abort("first")

    engine.submit(
        Request(
            request_id="first",
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=50, temperature=0),
            sink=sink,
        )
    )
    wait_for(lambda: second.done)
    assert second.tokens == runner.greedy([4, 5], 8)


@pytest.mark.parametrize("seed", range(4))
def test_exactly_one_terminal_event_whatever_fails(engines: Any, seed: int) -> None:
    """Faults of the device, NaN, aborts and raising sinks at once; no request hangs, no page is
    lost, and the text of those that end by themselves is right."""
    rng = random.Random(seed)

    def fault(index: int, phase: Phase, rows: Sequence[Row]) -> None:
        if index % 13 == seed:
            raise RuntimeError("injected")

    engine, runner = engines(
        max_num_seqs=6,
        max_num_batched_tokens=40,
        scheduling_policy=rng.choice(["fcfs", "lpm"]),
        runner={
            "on_forward": fault,
            "nan": lambda row: 99 in row.tokens,
            "num_pages": 30,
            "page_size": 4,
        },
    )
    asked: list[tuple[list[int], Answer, Request]] = []
    for i in range(120):
        length = rng.randrange(1, 40)
        prompt = numbers(0, length) if rng.random() < 0.5 else numbers(rng.randrange(200), length)
        answer = Answer()
        request = make_request(f"r{i}", prompt, answer, max_tokens=rng.randrange(1, 30))
        if rng.random() < 0.1:
            request = dataclasses.replace(request, sink=_raising(answer))
        engine.submit(request)
        asked.append((prompt, answer, request))
        if rng.random() < 0.3:
            engine.abort(f"r{rng.randrange(i + 1)}")
        if rng.random() < 0.2:
            time.sleep(0.002)
    assert engine.drain(PATIENCE)
    for prompt, answer, request in asked:
        if isinstance(answer.terminal, FinishEvent):
            assert answer.tokens == runner.greedy(prompt, len(answer.tokens))
            if answer.finish.finish_reason == "length":
                assert len(answer.tokens) == request.sampling.max_tokens
    wait_for(lambda: engine.stats().running == 0)
    stats = engine.stats()
    assert engine.healthy
    assert sum(stats.requests_finished.values()) == 120
    assert len(stats.requests_finished) == 3
    assert stats.pages_held == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def _raising(answer: Answer) -> Callable[[Event], None]:
    def sink(event: Event) -> None:
        answer.events.append(event)
        raise RuntimeError("reader is gone")

    return sink
