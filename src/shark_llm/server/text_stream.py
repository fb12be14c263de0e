"""From the engine's tokens to the text of one choice: detokenize, look for stop strings, count.

Plain Python without asyncio: events go in, text and the end come out. Streaming and non-streaming
answers are both built from it, which is why their texts are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shark_llm.engine.detokenizer import IncrementalDetokenizer, StopMatcher
from shark_llm.engine.request import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    PromptLogprobsEvent,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from shark_llm.server.tokenizer import PromptTokenizer

PromptLogprobs = tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, kw_only=True)
class ChoiceSpec:
    """One engine request: a prompt, how to sample, and where its text stops."""

    prompt_index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    """Stop strings that are special tokens: they have no text, so they stop by their id."""


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How a choice ended. `stop_reason` is the stop string, or the id of the stop token, that the
    client had asked for; it is None for the model's own EOS."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None
    stop_token_id: int | None = None
    stop_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What is new in one choice: text that is final, and the tokens that arrived with it."""

    index: int
    text: str
    tokens: tuple[TokenEvent, ...]
    finish: Finish | None
    prompt_logprobs: PromptLogprobs | None = None


class TextStream:
    """The text of one choice. Feed it events in order; `take` returns what may be sent."""

    def __init__(self, index: int, spec: ChoiceSpec, tokenizer: PromptTokenizer) -> None:
        self.index = index
        self.spec = spec
        self.finish: Finish | None = None
        self.terminal: FinishEvent | ErrorEvent | None = None
        self.completion_tokens = 0
        self._detokenizer = IncrementalDetokenizer(tokenizer.raw, spec.prompt_ids)
        self._matcher = StopMatcher(spec.stop, include_stop=spec.include_stop)
        self._text: list[str] = []
        self._tokens: list[TokenEvent] = []
        self._prompt_logprobs: PromptLogprobs | None = None
        self._taken_finish = False

    @property
    def cached_tokens(self) -> int:
        return self.terminal.cached_tokens if isinstance(self.terminal, FinishEvent) else 0

    def feed(self, event: Event) -> bool:
        """Take one event. True: a stop string was completed, so the engine should stop here."""
        if isinstance(event, TokenEvent):
            if self.finish is not None:  # made while our abort was on its way
                return False
            self.completion_tokens += 1
            self._tokens.append(event)
            return self._match(self._detokenizer.push(event.token_id))
        if isinstance(event, PromptLogprobsEvent):
            self._prompt_logprobs = event.logprobs
            return False
        self.terminal = event
        if isinstance(event, FinishEvent) and self.finish is None:
            self._end(event)
        return False

    def take(self) -> Delta | None:
        """What arrived since the last call, or None."""
        finish = None if self._taken_finish else self.finish
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        if not self._text and not self._tokens and finish is None and prompt_logprobs is None:
            return None
        delta = Delta(
            index=self.index,
            text="".join(self._text),
            tokens=tuple(self._tokens),
            finish=finish,
            prompt_logprobs=prompt_logprobs,
        )
        self._text.clear()
        self._tokens.clear()
        self._taken_finish = self.finish is not None
        return delta

    def _match(self, text: str) -> bool:
        # Before min_tokens are made nothing stops the text; matching starts behind them.
        if self.completion_tokens < self.spec.sampling.min_tokens:
            self._add(text)
            return False
        self._add(self._matcher.push(text))
        if self._matcher.matched is None:
            return False
        self.finish = Finish(finish_reason="stop", stop_reason=self._matcher.matched)
        return True

    def _end(self, event: FinishEvent) -> None:
        # A letter cut by the end is shown as the tokenizer shows it; then what was held back as the
        # possible beginning of a stop string turns out to be text.
        self._match(self._detokenizer.flush())
        if self.finish is not None:
            return
        self._add(self._matcher.flush())
        self.completion_tokens = event.completion_tokens
        token = event.stop_token_id
        stop_reason: str | int | None = None
        if token is not None and token in self.spec.sampling.stop_token_ids:
            stop_reason = self.spec.stop_tokens.get(token, token)
            if isinstance(stop_reason, str) and self.spec.include_stop:
                self._add(stop_reason)
        self.finish = Finish(
            finish_reason=event.finish_reason,
            stop_reason=stop_reason,
            stop_token_id=token,
            stop_logprobs=event.stop_logprobs,
        )

    def _add(self, text: str) -> None:
        if text:
            self._text.append(text)
