"""One API call in flight: its engine requests, and the one loop that turns their events into text.

    engine thread      sink: append (time, event) to the choice's deque, wake the loop once
    event loop         `deltas`: drain the deques, detokenize, yield what is final

Who ends what: `close` aborts every engine request that has not ended, whatever happened (the client
left, a stop string matched, an error, the deadline). It is called exactly once per generation, by
whoever answers the call.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from shark_llm.engine.request import ErrorEvent, Event, FinishEvent, Request, TokenEvent
from shark_llm.server.doorbell import Doorbell
from shark_llm.server.metrics import Metrics
from shark_llm.server.responses import (
    PromptTokensDetails,
    Usage,
)
from shark_llm.server.state import EnginePort
from shark_llm.server.text_stream import ChoiceSpec, Delta, Finish, PromptLogprobs, TextStream
from shark_llm.server.tokenizer import PromptTokenizer


class GenerationFailed(Exception):
    """The engine ended a request with an error after it was accepted."""

    def __init__(self, message: str, code: str, status: int = 500) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Completed:
    """One finished choice."""

    index: int
    text: str
    tokens: tuple[TokenEvent, ...]
    finish: Finish
    prompt_logprobs: PromptLogprobs | None


class Generation:
    """The choices of one call, submitted together and answered together."""

    def __init__(
        self,
        *,
        request_id: str,
        specs: Sequence[ChoiceSpec],
        engine: EnginePort,
        tokenizer: PromptTokenizer,
        metrics: Metrics,
        doorbell: Doorbell,
        max_backlog_tokens: int,
        request_timeout: float | None,
        owner: str,
        on_close: Callable[[Generation], None],
    ) -> None:
        self.request_id = request_id
        self._specs = specs
        self._engine = engine
        self._metrics = metrics
        self._owner = owner
        self._max_backlog = max_backlog_tokens
        self._doorbell = doorbell
        now = doorbell.loop.time()
        self._deadline = None if request_timeout is None else now + request_timeout
        self._wake = asyncio.Event()
        self._woken = False
        self._overrun = False
        self._started = time.monotonic()
        self._closed = False
        self._on_close = on_close
        self._submitted = 0
        self._choices = [
            _Choice(TextStream(index, spec, tokenizer), f"{request_id}-{index}")
            for index, spec in enumerate(specs)
        ]

    def prompt_ids(self, index: int) -> tuple[int, ...]:
        return self._choices[index].text.spec.prompt_ids

    def engine_id(self, index: int) -> str:
        return self._choices[index].engine_id

    def submit(self) -> None:
        """Hand all choices to the engine; if it refuses one, none is left behind.

        Raises:
            RequestError: the engine cannot take the request (too large for the pool, queue full).
        """
        try:
            for choice in self._choices:
                self._submit_one(choice)
                self._submitted += 1
        except BaseException:
            self.close()
            raise

    def _submit_one(self, choice: _Choice) -> None:
        spec = choice.text.spec
        sink = _Sink(self, choice)
        nothing_to_run = spec.sampling.max_tokens == 0 and spec.sampling.prompt_logprobs is None
        if nothing_to_run:  # the prompt is only to be echoed
            sink(
                FinishEvent(
                    finish_reason="length",
                    prompt_tokens=len(spec.prompt_ids),
                    completion_tokens=0,
                    cached_tokens=0,
                )
            )
            return
        self._engine.submit(
            Request(
                request_id=choice.engine_id,
                prompt_ids=spec.prompt_ids,
                sampling=spec.sampling,
                owner=self._owner,
                sink=sink,
            )
        )

    @property
    def is_running(self) -> bool:
        """Whether the engine still owes something."""
        return any(not choice.ended for choice in self._choices[: self._submitted])

    def abort(self) -> None:
        """Ask the engine to end what still runs; the choices finish with reason `abort`."""
        for choice in self._choices[: self._submitted]:
            if choice.text.terminal is None:
                self._engine.abort(choice.engine_id)

    def close(self) -> None:
        """End everything and keep nothing. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for choice in self._choices[: self._submitted]:
            if choice.text.terminal is None:
                self._engine.abort(choice.engine_id)
                self._metrics.finished(
                    choice.text.finish.finish_reason if choice.text.finish else "abort"
                )
        self._on_close(self)

    async def deltas(self) -> AsyncIterator[Delta]:
        """New text of any choice as it comes, until every choice has ended.

        The last delta of a choice carries its `finish`. After the last one, `usage` is known.

        Raises:
            GenerationFailed: the engine reported an error, the deadline passed, or the reader was
                so slow that the backlog limit was reached.
        """
        running = list(self._choices)
        while running:
            await self._wait()
            self._wake.clear()
            self._woken = False
            for choice in running:
                self._drain(choice)
                delta = choice.text.take()
                if delta is not None:
                    yield delta
                if isinstance(choice.text.terminal, ErrorEvent) and choice.text.finish is None:
                    error = choice.text.terminal
                    status = 400 if error.code == "grammar_too_complex" else 500
                    raise GenerationFailed(error.message, error.code, status)
            if self._overrun:
                raise GenerationFailed(
                    f"the client reads too slowly: {self._max_backlog} tokens were waiting for it",
                    "slow_reader",
                )
            running = [choice for choice in running if choice.text.terminal is None]

    async def collect(self) -> list[Completed]:
        """All choices, whole, in order of their index."""
        texts: list[list[str]] = [[] for _ in self._choices]
        tokens: list[list[TokenEvent]] = [[] for _ in self._choices]
        finishes: dict[int, Finish] = {}
        prompts: dict[int, PromptLogprobs] = {}
        async for delta in self.deltas():
            texts[delta.index].append(delta.text)
            tokens[delta.index].extend(delta.tokens)
            if delta.finish is not None:
                finishes[delta.index] = delta.finish
            if delta.prompt_logprobs is not None:
                prompts[delta.index] = delta.prompt_logprobs
        return [
            Completed(
                index=index,
                text="".join(texts[index]),
                tokens=tuple(tokens[index]),
                finish=finishes[index],
                prompt_logprobs=prompts.get(index),
            )
            for index in range(len(self._choices))
        ]

    def usage(self) -> Usage:
        """Token counts of the call: each prompt counts once, however many choices it has."""
        firsts = {choice.text.spec.prompt_index: choice for choice in reversed(self._choices)}
        prompt = sum(len(choice.text.spec.prompt_ids) for choice in firsts.values())
        cached = sum(choice.text.cached_tokens for choice in firsts.values())
        completion = sum(choice.text.completion_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def usage_of(self, index: int) -> Usage:
        """Token counts of one choice alone."""
        text = self._choices[index].text
        prompt = len(text.spec.prompt_ids)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=text.completion_tokens,
            total_tokens=prompt + text.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=text.cached_tokens),
        )

    async def _wait(self) -> None:
        if self._deadline is None:
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._wake.wait()
        except TimeoutError:
            raise GenerationFailed(
                "the request took longer than this server allows (--request-timeout); "
                "ask for fewer tokens",
                "timeout",
                status=504,
            ) from None

    def _drain(self, choice: _Choice) -> None:
        while choice.events:
            at, event = choice.events.popleft()
            if isinstance(event, TokenEvent):
                self._observe_token(choice, at)
            if choice.text.feed(event):
                self._engine.abort(choice.engine_id)
            if isinstance(event, FinishEvent | ErrorEvent):
                self._observe_end(choice, at, event)

    def _observe_token(self, choice: _Choice, at: float) -> None:
        if choice.last_token_at is None:
            self._metrics.time_to_first_token.observe(at - self._started)
        else:
            self._metrics.inter_token_latency.observe(at - choice.last_token_at)
        choice.last_token_at = at

    def _observe_end(self, choice: _Choice, at: float, event: FinishEvent | ErrorEvent) -> None:
        if isinstance(event, ErrorEvent):
            self._metrics.finished("error")
            return
        text = choice.text
        assert text.finish is not None
        self._metrics.finished(text.finish.finish_reason)
        self._metrics.e2e_request_latency.observe(at - self._started)
        timings = event.timings
        if timings is not None and timings.admitted is not None:
            self._metrics.request_queue_time.observe(timings.admitted - timings.submitted)
            if timings.first_token is not None:
                self._metrics.request_prefill_time.observe(timings.first_token - timings.admitted)
                self._metrics.request_decode_time.observe(timings.finished - timings.first_token)
        self._metrics.request_prompt_tokens.observe(event.prompt_tokens)
        self._metrics.request_generation_tokens.observe(text.completion_tokens)

    def _on_backlog(self, choice: _Choice) -> None:
        self._overrun = True
        self._engine.abort(choice.engine_id)


class _Choice:
    """A text stream, and the events that the engine thread has left for it."""

    def __init__(self, text: TextStream, engine_id: str) -> None:
        self.text = text
        self.engine_id = engine_id
        self.events: deque[tuple[float, Event]] = deque()
        self.last_token_at: float | None = None
        self.ended = False  # the engine is done with it, whether or not anybody has read the end


class _Sink:
    """Called on the engine thread for each event of one choice; never blocks, never raises."""

    def __init__(self, generation: Generation, choice: _Choice) -> None:
        self._generation = generation
        self._choice = choice

    def __call__(self, event: Event) -> None:
        generation, choice = self._generation, self._choice
        choice.events.append((time.monotonic(), event))
        if event.is_terminal:
            choice.ended = True
        try:
            if not generation._woken:
                # Set before the call: a drain that runs in between sees our event anyway.
                generation._woken = True
                generation._doorbell.ring(generation._wake)
            if len(choice.events) == generation._max_backlog:
                loop = generation._doorbell.loop
                loop.call_soon_threadsafe(generation._on_backlog, choice)
        except RuntimeError:
            # The event loop is closed: the process is on its way out and nobody reads any more.
            choice.events.clear()
