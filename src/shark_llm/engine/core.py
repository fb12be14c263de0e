"""The engine without its thread: take requests in, run one step, send events out.

    add -> Scheduler.plan -> batching -> ModelRunner.run -> sampling -> sink
                ^                                                  |
                +------------- computed, finish <------------------+

Events are sent right before the device is started again: the receivers' work, and the contest for
the interpreter that it brings, then runs beside the device and not between two of its runs.

A fault stays as small as it can: a forward that raises ends the requests of its rows, logits that
are not finite end their own request, a sink that raises ends the request it belongs to. After
`max_consecutive_failures` forwards in a row that raised, the device is taken for dead.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence

from shark_llm.engine.batching import decode_groups, prefill_groups
from shark_llm.engine.drawing import F32
from shark_llm.engine.guidance import GuideError
from shark_llm.engine.request import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    PromptLogprobsEvent,
    Request,
    RequestTimings,
    TokenEvent,
)
from shark_llm.engine.row_sums import RowSums
from shark_llm.engine.sampling import SamplerState, sample, token_logprobs
from shark_llm.engine.scheduler import ScheduledRow, Scheduler
from shark_llm.engine.settings import EngineSettings
from shark_llm.engine.state import RequestState
from shark_llm.engine.stats import EngineStats
from shark_llm.errors import UsageError
from shark_llm.runtime.runner import ModelRunner, Phase, Row

logger = logging.getLogger(__name__)

# What clients read, here and in `failure` and `breach`. What an exception said may name files and
# devices: it goes to the log alone.
ENGINE_DEAD = "the engine has stopped after a failure and must be restarted"
NOTHING_NEW = "the engine found its memory accounting broken and starts nothing new"
SINK_FAILED = ErrorEvent(message="the receiver of this request's tokens failed", code="sink_failed")


class EngineCore:
    """One step after the other. Not thread-safe: one caller, the engine thread or a test."""

    def __init__(
        self, runner: ModelRunner, settings: EngineSettings, *, eos_token_ids: Collection[int]
    ) -> None:
        least = settings.max_num_seqs + runner.page_size
        if settings.max_num_batched_tokens < least:
            raise UsageError(
                f"max_num_batched_tokens is {settings.max_num_batched_tokens}; it must be at least "
                f"max_num_seqs + page_size = {least}, or prefill would starve beside full decodes"
            )
        self.runner = runner
        self.settings = settings
        # Tokenizers may name an EOS that the model has no row for: it can never be drawn.
        self.eos_token_ids = frozenset(t for t in eos_token_ids if 0 <= t < runner.vocab_size)
        self.max_model_len = _max_model_len(runner, settings)
        self.scheduler = self._new_scheduler()
        self.failure: str | None = None
        """One line: the device is dead. Nothing runs any more."""
        self.breach: str | None = None
        """One line: page ownership is broken. What runs goes on, nothing new starts."""
        self._states: dict[str, RequestState] = {}
        self._outbox: list[tuple[RequestState, Event]] = []
        self._deaf: set[RequestState] = set()
        """Requests whose sink raised: nothing but an error goes there any more. Those that still
        run end before the next step is planned."""
        self._num_accepted = 0
        self._finished: Counter[str] = Counter()
        self._failures_in_a_row = 0
        self._num_failures = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._steps = 0
        self._step_seconds = 0.0
        self._step_ended: float | None = None
        self._batches: dict[Phase, Counter[int]] = {"prefill": Counter(), "decode": Counter()}

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def add(self, request: Request, *, submitted: float | None = None) -> None:
        """Take a request in, checked by `check_request`. `submitted` is a `time.monotonic`."""
        if not self.has_requests:
            self._step_ended = None  # the device did not wait: there was nothing to run
        params = request.sampling
        state = RequestState(
            request,
            arrival=self._num_accepted,
            sampler=SamplerState(params, request.prompt_ids, self.eos_token_ids),
            root=self.scheduler.cache.root,
            submitted=time.monotonic() if submitted is None else submitted,
        )
        self._num_accepted += 1
        self._states[request.request_id] = state
        self.scheduler.add(state)
        if self.failure is not None:
            self._fail(state, ENGINE_DEAD, "engine_dead")
        elif self.breach is not None:
            self._fail(state, NOTHING_NEW, "integrity_breach")
        elif not state.is_scoring:
            self._prompt_scored(state)  # at once: the only token of the prompt has no predecessor
            if params.max_tokens == 0:
                self._finish(state, "length")

    def abort(self, request_id: str) -> None:
        """End a request now. Unknown and ended ones are left alone."""
        state = self._states.get(request_id)
        if state is not None:
            self._finish(state, "abort")

    def abort_all(self) -> None:
        for state in list(self._states.values()):
            self._finish(state, "abort")

    def fail_all(self, message: str) -> None:
        """The engine can go on no more: every request ends with an error.

        The scheduler may be what failed, so it is not asked to take anything out; a new one stands
        for the empty engine.
        """
        self.failure = message
        states, self._states = self._states, {}
        self.scheduler = self._new_scheduler()
        for state in states.values():
            self._finished["error"] += 1
            self._send(state, ErrorEvent(message=ENGINE_DEAD, code="engine_dead"))

    def step(self) -> None:
        """Run one step: every running request that has a row gets it computed, or an error."""
        # What lies between two steps of a busy engine is time in which the device waits, too.
        began = time.perf_counter() if self._step_ended is None else self._step_ended
        self._step_ended = None
        for state in self._deaf:
            if self._states.get(state.request.request_id) is state:
                self._fail(state, SINK_FAILED.message, SINK_FAILED.code)
        if not self.has_requests:
            self.flush()
            return
        plan = self.scheduler.plan()
        if plan.admitted:
            now = time.monotonic()
            for state in plan.admitted:
                state.admitted = now
                self._prompt_tokens += state.prompt_len
        assert plan.decode or plan.prefill, "requests wait but none can run"
        runner = self.runner
        for group in decode_groups(plan.decode, runner.decode_batch_sizes):
            self._forward("decode", group)
        for group in prefill_groups(plan.prefill, runner.prefill_batch_sizes, runner.page_size):
            self._forward("prefill", group)
        self._steps += 1
        self._check_ownership()
        if not self.has_requests:
            self.flush()  # no device run follows to send beside
        ended = time.perf_counter()
        self._step_seconds += ended - began
        if self.has_requests:
            self._step_ended = ended

    def flush(self) -> None:
        """Send the events that wait."""
        outbox, self._outbox = self._outbox, []
        for state, event in outbox:
            if state in self._deaf:
                if not event.is_terminal:
                    continue
                self._deaf.discard(state)
                event = SINK_FAILED  # whatever its end was: it missed a part
            try:
                state.request.sink(event)
            except Exception:
                logger.exception("the sink of request %s raised", state.request.request_id)
                if not event.is_terminal:
                    self._deaf.add(state)

    def check_integrity(self) -> list[str]:
        """Every breach of page ownership, one line each."""
        return self.scheduler.check_integrity()

    def stats(self) -> EngineStats:
        """A consistent snapshot; to be called between steps."""
        scheduler = self.scheduler
        return EngineStats(
            healthy=self.failure is None and self.breach is None,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_total=scheduler.pool.total,
            pages_free=scheduler.pool.num_free,
            pages_cached=scheduler.cache.num_pages,
            pages_held=scheduler.num_held_pages,
            pages_evictable=scheduler.cache.num_evictable,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            requests_accepted=self._num_accepted,
            requests_finished=dict(self._finished),
            forward_failures=self._num_failures,
            steps=self._steps,
            step_seconds=self._step_seconds,
            forward_seconds=self.runner.device_seconds,
            decode_batches=dict(self._batches["decode"]),
            prefill_batches=dict(self._batches["prefill"]),
        )

    def _new_scheduler(self) -> Scheduler:
        runner = self.runner
        return Scheduler(self.settings, page_size=runner.page_size, num_pages=runner.num_pages)

    def _forward(self, phase: Phase, group: Sequence[ScheduledRow]) -> None:
        """Run one forward and see to each of its rows."""
        if self.failure is not None:
            return
        size = self.runner.page_size
        rows = [
            Row(
                tokens=row.state.tokens[row.start : row.end],
                start=row.start,
                pages=row.state.pages[: -(-row.end // size)],
            )
            for row in group
        ]
        self._batches[phase][len(rows)] += 1
        self.flush()
        try:
            output = self.runner.run(phase, rows)
            # Greedy tokens are there already: the logits stay on the device.
            logits = output.read_logits() if any(row.needs_logits for row in group) else None
            sums = RowSums(output, group)
        except Exception as error:
            self._forward_failed(group, error)
            return
        self._failures_in_a_row = 0
        for i, row in enumerate(group):
            state, best = row.state, int(output.best_tokens[i])
            if best == self.runner.vocab_size:
                self._fail(state, "the model returned logits that are not finite", "invalid_logits")
                continue
            self.scheduler.computed(row)
            if row.end == len(state.tokens):
                of_row = None if logits is None else logits[i]
                self._draw(state, of_row, best, sums.drawing(i), sums.logprobs(i))
            elif logits is not None and row.is_scored:
                self._score(state, logits[i], best, sums.logprobs(i))

    def _draw(
        self,
        state: RequestState,
        logits: F32 | None,
        best: int,
        sums: F32 | None,
        unit_sums: F32 | None,
    ) -> None:
        try:
            drawn = sample(logits, best, state.sampler, sums, unit_sums)
        except GuideError as error:
            message = f"the grammar is too complex for this text ({error}); simplify it"
            self._fail(state, message, "grammar_too_complex")
            return
        except Exception:  # a fault of our own, with this request's parameters: the others go on
            logger.exception("sampling failed for request %s", state.request.request_id)
            self._fail(state, "the server failed to choose the next token", "internal_error")
            return
        if drawn is None:
            message = "min_tokens and the stop tokens leave no token to choose from"
            self._fail(state, message, "invalid_logits")
            return
        event = TokenEvent(token_id=drawn.token_id, logprobs=drawn.logprobs)
        self._accept(state, drawn.token_id, event)

    def _score(self, state: RequestState, logits: F32, best: int, unit_sums: F32 | None) -> None:
        """Say how likely the next token of the prompt was; (V,) are the logits before it."""
        assert state.prompt_logprobs is not None
        params = state.request.sampling
        next_token = state.tokens[len(state.prompt_logprobs)]
        scored = token_logprobs(logits, best, next_token, params.prompt_logprobs or 0, unit_sums)
        state.prompt_logprobs.append(scored)
        if not state.is_scoring:
            self._prompt_scored(state)
            if params.max_tokens == 0:
                self._finish(state, "length")

    def _accept(self, state: RequestState, token: int, event: TokenEvent) -> None:
        """A token was drawn: send it, or end the request with it, or both."""
        params = state.request.sampling
        self._generation_tokens += 1
        if state.first_token is None:
            state.first_token = time.monotonic()
        state.tokens.append(token)
        state.sampler.accept(token)
        if token in state.sampler.stop_ids:
            self._finish(state, "stop", stop=event)
            return
        self._send(state, event)
        if state.sampler.is_complete:
            self._finish(state, "stop")
        elif state.num_generated >= params.max_tokens or len(state.tokens) >= self.max_model_len:
            self._finish(state, "length")

    def _prompt_scored(self, state: RequestState) -> None:
        if state.prompt_logprobs is not None:
            self._send(state, PromptLogprobsEvent(logprobs=tuple(state.prompt_logprobs)))

    def _forward_failed(self, group: Sequence[ScheduledRow], error: Exception) -> None:
        self._num_failures += 1
        self._failures_in_a_row += 1
        logger.error("forward of %d rows failed", len(group), exc_info=error)
        for row in group:
            self._fail(row.state, "the device failed while it ran this request", "forward_failed")
        if self._failures_in_a_row >= self.settings.max_consecutive_failures:
            self.fail_all(
                f"the device failed {self._failures_in_a_row} times in a row, "
                f"last with {type(error).__name__}"
            )

    def _finish(
        self, state: RequestState, reason: FinishReason, *, stop: TokenEvent | None = None
    ) -> None:
        self._end(
            state,
            reason,
            FinishEvent(
                finish_reason=reason,
                prompt_tokens=state.prompt_len,
                completion_tokens=state.num_generated,
                cached_tokens=state.cached_tokens,
                stop_token_id=None if stop is None else stop.token_id,
                stop_logprobs=None if stop is None else stop.logprobs,
                timings=RequestTimings(
                    submitted=state.submitted,
                    admitted=state.admitted,
                    first_token=state.first_token,
                    finished=time.monotonic(),
                ),
            ),
        )

    def _fail(self, state: RequestState, message: str, code: str) -> None:
        self._end(state, "error", ErrorEvent(message=message, code=code))

    def _end(self, state: RequestState, outcome: str, event: Event) -> None:
        """The one place where a request leaves: its terminal event is the last it sends."""
        # What a failed forward left in the pages is unknown, so nobody may match it.
        self.scheduler.finish(state, reusable=outcome != "error")
        del self._states[state.request.request_id]
        self._finished[outcome] += 1
        self._send(state, event)

    def _send(self, state: RequestState, event: Event) -> None:
        self._outbox.append((state, event))

    def _check_ownership(self) -> None:
        """Count the pages at every step, and look at each of them now and then."""
        scheduler = self.scheduler
        pool = scheduler.pool
        count = pool.num_free + scheduler.cache.num_pages + scheduler.num_held_pages
        if count == pool.total and not pool.breaches:
            if self._steps % self.settings.integrity_check_interval:
                return
            problems = self.check_integrity()
            if not problems:
                return
        else:
            problems = self.check_integrity() or [f"{count} pages counted, {pool.total} exist"]
        if self.breach is None:
            logger.critical("page ownership is broken: %s", "; ".join(problems))
            self.breach = f"page ownership is broken, restart the server: {problems[0]}"
        for state in list(scheduler.waiting):
            self._fail(state, NOTHING_NEW, "integrity_breach")


def _max_model_len(runner: ModelRunner, settings: EngineSettings) -> int:
    """Most tokens of prompt and output together: what module and pages allow, or the setting.

    The last token of an output is never an input, so its key and value need no place.
    """
    pages = runner.num_pages - 1
    most = min(runner.max_model_len, pages * runner.page_size + 1)
    if settings.max_model_len is None:
        return most
    if settings.max_model_len > most:
        raise UsageError(
            f"max_model_len is {settings.max_model_len}; the compiled module allows "
            f"{runner.max_model_len} tokens and the {pages} pages of the KV cache hold "
            f"{pages * runner.page_size}: lower it, or give the cache more pages"
        )
    return settings.max_model_len
