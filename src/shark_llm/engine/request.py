"""The nouns of the engine: what is asked, what comes back, and how it ends.

A `Request` is submitted once and answered by a stream of events through its `sink`: at most one
`PromptLogprobsEvent`, any number of `TokenEvent`, then exactly one terminal event (`FinishEvent` or
`ErrorEvent`), whatever fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shark_llm.engine.guidance import Grammar

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Values are valid: the server checks them at its edge.

    Filters apply in the order penalties, logit_bias, grammar, temperature, top_k, top_p, min_p.
    """

    max_tokens: int  # 0 = nothing is generated: only the prompt is scored
    min_tokens: int = 0  # until then EOS and stop_token_ids cannot be drawn
    temperature: float = 1.0  # 0 = greedy
    top_k: int | None = None  # None = off; larger than the vocabulary = off
    top_p: float = 1.0  # (0, 1]; the best token is always kept
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()  # beyond the model's own EOS ids
    ignore_eos: bool = False
    logprobs: int | None = None  # None = off; N = the sampled token's and the N best
    prompt_logprobs: int | None = None  # None = off; N = each prompt token's and the N best
    grammar: Grammar | None = None
    """What the text must match. The request ends where nothing can follow, whatever min_tokens and
    ignore_eos say; until then these only bar an end that could also be put off."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities (natural log) of one token and of the best alternatives, best first.

    They are the model's own: log-softmax of the logits before penalties, bias and temperature.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class PromptLogprobsEvent:
    """What the model thought of the prompt: one entry per prompt token; the first, which nothing
    precedes, is None. Sent once, before the first `TokenEvent`, if it was asked for."""

    is_terminal: ClassVar[bool] = False
    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One generated token. An EOS or stop token that ends the request is not sent as a token of
    text: it comes with `FinishEvent.stop_token_id`, and is counted in `completion_tokens`."""

    is_terminal: ClassVar[bool] = False
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, kw_only=True)
class RequestTimings:
    """When a request reached each stage, in seconds of `time.monotonic`; None = it never did."""

    submitted: float
    admitted: float | None
    """First time it was given pages."""
    first_token: float | None
    finished: float


@dataclass(frozen=True, kw_only=True)
class FinishEvent:
    """The request ended by itself, or was aborted.

    `cached_tokens` of the prompt came from the prefix cache; always less than `prompt_tokens`.
    """

    is_terminal: ClassVar[bool] = True
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_token_id: int | None = None
    stop_logprobs: TokenLogprobs | None = None
    """Of the token `stop_token_id`, if logprobs were asked for."""
    timings: RequestTimings | None = None


@dataclass(frozen=True, kw_only=True)
class ErrorEvent:
    """The request failed after it was accepted.

    `code`: forward_failed (the runner raised), invalid_logits (not finite, or nothing left to
    choose from), grammar_too_complex (a limit was met in the middle of the text), internal_error (a
    fault of our own with this request), engine_dead, integrity_breach (page ownership was found
    broken before it started), sink_failed (its sink raised).
    """

    is_terminal: ClassVar[bool] = True
    message: str
    code: str


Event = PromptLogprobsEvent | TokenEvent | FinishEvent | ErrorEvent


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue. `sink` is called on the engine thread and must not block or raise."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    owner: str = ""
    """Who asks: waiting requests are admitted in turns, one owner after the other."""
    sink: Callable[[Event], None]
