"""Whatever arrives whenever, every request gets what it would get alone, and no page is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import Answer, Driver, alone
from fake_runner import FakeRunner
from shark_llm.engine.scheduler import StepPlan

PAGE = 4
VOCAB = 40
COMMON = [(7 * i + 3) % VOCAB for i in range(24)]


@dataclass(frozen=True)
class Arrival:
    """A request, and how many steps pass before it and before its abort."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    after: int
    abort_after: int | None


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    result = []
    for i in range(draw(st.integers(1, 14))):
        shared = COMMON[: draw(st.integers(0, 24))]
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10))
        sampling: dict[str, Any] = {"max_tokens": draw(st.integers(1, 16))}
        kind = draw(st.sampled_from(["greedy", "greedy", "seeded", "penalized", "scored"]))
        if kind == "seeded":
            sampling |= {"temperature": 1.0, "seed": i, "top_p": 0.9, "logprobs": 1}
        elif kind == "penalized":
            sampling |= {"temperature": 0.7, "seed": i, "frequency_penalty": 1.5, "top_k": 9}
        elif kind == "scored":
            sampling |= {"prompt_logprobs": 1}
        result.append(
            Arrival(
                prompt=(*shared, *own),
                sampling=sampling,
                after=draw(st.integers(0, 3)),
                abort_after=draw(st.none() | st.integers(0, 25)),
            )
        )
    return result


SETTINGS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 10),
        "max_num_batched_tokens": st.integers(14, 60),
        "enable_prefix_caching": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "lpm"]),
        "max_overtakes": st.integers(0, 6),
    }
)


def make_driver(num_pages: int, chosen: dict[str, Any]) -> Driver:
    runner = FakeRunner(
        page_size=PAGE, num_pages=num_pages, vocab_size=VOCAB, max_model_len=60, record=True
    )
    return Driver(runner, **chosen)


def watch_plans(driver: Driver) -> list[StepPlan]:
    """Record every plan, and check the budget and the shape of its rows."""
    plans: list[StepPlan] = []
    plan_step = driver.scheduler.plan

    def plan() -> StepPlan:
        result = plan_step()
        plans.append(result)
        rows = result.decode + result.prefill
        budget = driver.core.settings.max_num_batched_tokens
        assert sum(row.end - row.start for row in rows) <= budget
        assert len({id(row.state) for row in rows}) == len(rows) <= budget
        assert all(row.end - row.start == 1 for row in result.decode)
        assert all(row.start % PAGE == 0 for row in result.prefill)
        # Nobody starves: the oldest running request always has a row.
        assert any(row.state is driver.scheduler.running[0] for row in rows)
        return result

    driver.scheduler.plan = plan  # type: ignore[method-assign]
    return plans


@settings(max_examples=120, deadline=None)
@given(work=arrivals(), num_pages=st.integers(14, 40), chosen=SETTINGS)
def test_as_if_alone(work: list[Arrival], num_pages: int, chosen: dict[str, Any]) -> None:
    """Batch composition, chunks, cache hits and preemption change no token and no logprob."""
    driver = make_driver(num_pages, chosen)
    watch_plans(driver)
    answers = []
    for arrival in work:
        driver.step(arrival.after)
        answers.append(driver.add(arrival.prompt, **arrival.sampling))
    driver.run()
    for arrival, answer in zip(work, answers, strict=True):
        expected = alone(driver.runner, arrival.prompt, **arrival.sampling)
        assert answer.events[:-1] == expected.events[:-1]
        assert answer.finish.completion_tokens == arrival.sampling["max_tokens"]
        assert answer.finish.cached_tokens < len(arrival.prompt)
    stats = driver.core.stats()
    assert stats.prompt_tokens == sum(len(arrival.prompt) for arrival in work)
    assert stats.generation_tokens == sum(a.sampling["max_tokens"] for a in work)


@settings(max_examples=120, deadline=None)
@given(work=arrivals(), num_pages=st.integers(14, 40), chosen=SETTINGS)
def test_aborts_leak_nothing(work: list[Arrival], num_pages: int, chosen: dict[str, Any]) -> None:
    """Aborts at any step: one terminal event each, true tokens until then, every page back."""
    driver = make_driver(num_pages, chosen)
    aborts: dict[int, list[int]] = {}
    answers: list[Answer] = []
    now = 0

    def step() -> None:
        nonlocal now
        for i in aborts.pop(now, []):
            driver.abort(i)
        driver.step()
        now += 1

    for i, arrival in enumerate(work):
        for _ in range(arrival.after):
            step()
        answers.append(driver.add(arrival.prompt, **arrival.sampling))
        if arrival.abort_after is not None:
            aborts.setdefault(now + arrival.abort_after, []).append(i)
    while driver.core.has_requests or aborts:
        assert now < 3000
        step()
    driver.run()
    for arrival, answer in zip(work, answers, strict=True):
        expected = alone(driver.runner, arrival.prompt, **arrival.sampling)
        assert answer.tokens == expected.tokens[: len(answer.tokens)]
        if answer.finish.finish_reason == "length":
            assert answer.tokens == expected.tokens
        else:
            assert arrival.abort_after is not None


@settings(max_examples=60, deadline=None)
@given(
    chosen=SETTINGS,
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=2, max_size=14),
    victim=st.integers(0, 13),
)
def test_waiting_is_bounded(
    chosen: dict[str, Any], sizes: list[tuple[int, int]], victim: int
) -> None:
    """No waiting request sees more than `max_overtakes` later arrivals admitted before it, while
    new ones with a warm prefix never stop arriving."""
    driver = make_driver(16, chosen)
    plans = watch_plans(driver)
    driver.ask(COMMON, max_tokens=1)
    for i, (length, max_tokens) in enumerate(sizes):
        prompt = [*COMMON[: length - 1], i] if i % 2 else [i] * length
        driver.add(prompt, max_tokens=max_tokens)
    watched = list(driver.scheduler.waiting)[min(victim, len(sizes) - 1)]
    steps = 0
    while watched.admitted is None:
        steps += 1
        assert steps < 1500
        driver.add([*COMMON[:20], steps % VOCAB], max_tokens=2)
        driver.step()
    admitted = [state for plan in plans for state in plan.admitted]
    later = [s for s in admitted[: admitted.index(watched)] if s.arrival > watched.arrival]
    assert len(later) <= chosen["max_overtakes"]
