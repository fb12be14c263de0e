"""Drives an EngineCore step by step in tests, with the integrity check after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fake_runner import FakeRunner
from shark_llm.engine.core import EngineCore
from shark_llm.engine.request import (
    ErrorEvent,
    Event,
    FinishEvent,
    PromptLogprobsEvent,
    Request,
    SamplingParams,
    TokenEvent,
)
from shark_llm.engine.settings import EngineSettings


class Answer:
    """The events of one request, and what they say."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenEvent)]

    @property
    def logprobs(self) -> list[Any]:
        return [event.logprobs for event in self.events if isinstance(event, TokenEvent)]

    @property
    def prompt_logprobs(self) -> Any:
        (event,) = [e for e in self.events if isinstance(e, PromptLogprobsEvent)]
        return event.logprobs

    @property
    def done(self) -> bool:
        return any(event.is_terminal for event in self.events)

    @property
    def finish(self) -> FinishEvent:
        """The terminal event, checked to be the only one and the last, and no error."""
        event = self.terminal
        assert isinstance(event, FinishEvent), event
        return event

    @property
    def error(self) -> ErrorEvent:
        event = self.terminal
        assert isinstance(event, ErrorEvent), event
        return event

    @property
    def terminal(self) -> Event:
        assert [event.is_terminal for event in self.events].count(True) == 1, self.events
        assert self.events[-1].is_terminal
        return self.events[-1]


def make_request(
    request_id: str, prompt: Sequence[int], answer: Answer, owner: str = "", **sampling: Any
) -> Request:
    """Greedy and 8 tokens unless told otherwise."""
    params = {"max_tokens": 8, "temperature": 0.0} | sampling
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(**params),
        owner=owner,
        sink=answer.events.append,
    )


class Driver:
    """An EngineCore on a FakeRunner."""

    def __init__(
        self,
        runner: FakeRunner,
        *,
        eos_token_ids: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        self.runner = runner
        self.core = EngineCore(
            runner,
            EngineSettings(**({"integrity_check_interval": 1} | settings)),
            eos_token_ids=eos_token_ids,
        )
        self.scheduler = self.core.scheduler
        self.num_added = 0

    def add(self, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Submit under the id "r<n>", n counting from 0. `owner` may be among the keywords."""
        answer = Answer()
        self.core.add(make_request(f"r{self.num_added}", prompt, answer, **sampling))
        self.core.flush()
        self.num_added += 1
        return answer

    def abort(self, number: int) -> None:
        """Abort the request that was added as the `number`-th."""
        self.core.abort(f"r{number}")
        self.core.flush()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.core.has_requests:
                self.core.step()
                self.core.flush()
            assert self.core.check_integrity() == []

    def run(self, most_steps: int = 5000) -> None:
        """Step until nothing is left."""
        for _ in range(most_steps):
            if not self.core.has_requests:
                stats = self.core.stats()
                assert stats.pages_held == 0
                assert stats.pages_evictable == stats.pages_cached
                assert stats.pages_free + stats.pages_cached == stats.pages_total
                assert self.core.breach is None
                return
            self.step()
        raise AssertionError(f"not done after {most_steps} steps: {self.core.stats()}")

    def ask(self, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Submit and run to the end."""
        answer = self.add(prompt, **sampling)
        self.run()
        return answer


def alone(runner: FakeRunner, prompt: Sequence[int], **sampling: Any) -> Answer:
    """What a request gives on an engine of its own, without cache and with pages to spare."""
    fresh = FakeRunner(
        page_size=runner.page_size,
        num_pages=256,
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        next_token=runner.next_token,
    )
    driver = Driver(
        fresh,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_num_batched_tokens=fresh.max_model_len + fresh.page_size + 1,
    )
    return driver.ask(prompt, **sampling)
