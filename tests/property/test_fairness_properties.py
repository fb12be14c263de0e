"""The two bounds on waiting, within an owner and across owners, under any arrivals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import Driver
from fake_runner import FakeRunner
from shark_llm.engine.state import RequestState

PAGE = 4
VOCAB = 40
COMMON = [(7 * i + 3) % VOCAB for i in range(20)]


@dataclass(frozen=True)
class Arrival:
    owner: str
    prompt: tuple[int, ...]
    max_tokens: int
    after: int  # steps


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        owner=st.sampled_from("aaaabbc"),  # unequal demand
        prompt=st.tuples(st.integers(0, 20), st.lists(st.integers(0, VOCAB - 1), min_size=1)).map(
            lambda pair: (*COMMON[: pair[0]], *pair[1][:12])
        ),
        max_tokens=st.integers(1, 6),
        after=st.sampled_from([0, 0, 0, 1, 2]),
    ),
    min_size=2,
    max_size=40,
)


def run(work: list[Arrival], **chosen: Any) -> tuple[list[RequestState], list[tuple[str, str]]]:
    """The requests in order of admission; and (owner, owner admitted meanwhile) for each admission
    that another owner had while requests of the first one waited for their next."""
    runner = FakeRunner(page_size=PAGE, num_pages=14, vocab_size=VOCAB, max_model_len=48)
    driver = Driver(runner, **chosen)
    scheduler = driver.scheduler
    admitted: list[RequestState] = []
    since: dict[str, list[str]] = {}
    problems: list[tuple[str, str]] = []
    plan_step = scheduler.plan

    def plan() -> Any:
        waiting = [state for state in scheduler.waiting if not state.num_preemptions]
        result = plan_step()
        for state in result.admitted:
            admitted.append(state)
            waiting.remove(state)
            owner = state.request.owner
            since[owner] = []
            for other in {each.request.owner for each in waiting} - {owner}:
                seen = since.setdefault(other, [])
                if owner in seen:
                    problems.append((other, owner))
                seen.append(owner)
        for owner in list(since):  # who waits no more counts anew when it comes back
            if not any(state.request.owner == owner for state in waiting):
                del since[owner]
        return result

    scheduler.plan = plan  # type: ignore[method-assign]
    for arrival in work:
        driver.step(arrival.after)
        driver.add(arrival.prompt, max_tokens=arrival.max_tokens, owner=arrival.owner)
    driver.run()
    assert len(admitted) == len(work)
    return admitted, problems


CHOSEN = {
    "max_num_seqs": st.integers(1, 5),
    "max_num_batched_tokens": st.integers(12, 60),
    "scheduling_policy": st.sampled_from(["fcfs", "lpm"]),
    "max_overtakes": st.integers(0, 5),
}


@settings(max_examples=150, deadline=None)
@given(work=ARRIVALS, chosen=st.fixed_dictionaries(CHOSEN))
def test_between_two_admissions_every_other_owner_has_one(
    work: list[Arrival], chosen: dict[str, Any]
) -> None:
    """Without a cache nobody steps aside, and the turns are strict."""
    _, problems = run(work, enable_prefix_caching=False, **chosen)
    assert problems == []


@settings(max_examples=150, deadline=None)
@given(work=ARRIVALS, chosen=st.fixed_dictionaries(CHOSEN))
def test_overtaking_is_bounded_within_an_owner(work: list[Arrival], chosen: dict[str, Any]) -> None:
    """And while requests step aside for a prefix, others' turns are at most so many more."""
    admitted, problems = run(work, **chosen)
    bound = chosen["max_overtakes"]
    for position, state in enumerate(admitted):
        later = [
            other
            for other in admitted[:position]
            if other.request.owner == state.request.owner and other.arrival > state.arrival
        ]
        assert len(later) <= bound
    for owner in "abc":
        extra = [pair for pair in problems if pair[0] == owner]
        assert len(extra) <= bound * sum(arrival.owner == owner for arrival in work)
