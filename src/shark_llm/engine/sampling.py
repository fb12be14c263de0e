"""From logits to the next token.

All arithmetic of a row depends on that row alone: numpy works along the vocabulary, and randomness
is a function of (seed, number of tokens generated so far). So a seeded request draws the same
tokens alone, in any row of any batch, after a preemption and with a warm cache, given the same
logits.

Legend: B rows of a forward, V vocabulary, K = ceil(V / SUM_BLOCK) blocks of it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from shark_llm.artifacts.manifest import SUM_BLOCK
from shark_llm.engine.drawing import F32, F64, Ids, Softmax, draw, top_k
from shark_llm.engine.request import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-20
"""Temperatures under this are the limit, greedy: dividing by them would leave the range of f32."""
MAX_LIFT = 20.0
"""How far below the best logit, in temperatures, an edited row's best one may be for the sums of
the unedited row to be used: f32 ends at 87."""
_MASK64 = (1 << 64) - 1


class TokenCounts:
    """The distinct tokens of a request and how often it generated each, as arrays that grow."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        ids = sorted(set(prompt_ids))
        self._slots = {token: slot for slot, token in enumerate(ids)}
        self._ids = np.array([*ids, *[0] * 64], np.intp)
        self._counts = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        """Count one generated token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    def arrays(self) -> tuple[Ids, F32]:
        """Ids of prompt and output, and the count of each in the output."""
        size = len(self._slots)
        return self._ids[:size], self._counts[:size]


class SamplerState:
    """What sampling remembers of one request. `seed` None draws one from the operating system."""

    __slots__ = (
        "barred_ends",
        "bias",
        "counts",
        "guide",
        "has_penalties",
        "num_generated",
        "params",
        "seed",
        "stop_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_token_ids: Collection[int],
    ) -> None:
        self.params = params
        self.seed = (secrets.randbits(64) if params.seed is None else params.seed) & _MASK64
        self.stop_ids = frozenset(params.stop_token_ids)
        """Tokens that end the request. They cannot be drawn before min_tokens."""
        self.guide = None if params.grammar is None else params.grammar.start()
        self.barred_ends: frozenset[int] = frozenset()
        """EOS ids that `ignore_eos` bars: a grammar would take them for its end."""
        if not params.ignore_eos or self.guide is not None:
            self.stop_ids |= frozenset(eos_token_ids)
        if params.ignore_eos and self.guide is not None:
            self.barred_ends = frozenset(eos_token_ids)
        self.num_generated = 0
        self.has_penalties = (
            params.presence_penalty != 0
            or params.frequency_penalty != 0
            or params.repetition_penalty != 1
        )
        self.counts = TokenCounts(prompt_ids if self.has_penalties else ())
        self.bias: tuple[Ids, F32] | None = None
        if params.logit_bias:
            self.bias = (
                np.fromiter(params.logit_bias.keys(), np.intp),
                np.fromiter(params.logit_bias.values(), np.float32),
            )

    @property
    def edits_logits(self) -> bool:
        """The next token is not drawn from the logits as they are."""
        return (
            self.has_penalties
            or self.bias is not None
            or self.guide is not None
            or bool(self.barred)
        )

    @property
    def takes_best(self) -> bool:
        """The next token is the model's best, and nothing else is asked for."""
        return self.is_greedy and self.params.logprobs is None and not self.edits_logits

    @property
    def is_greedy(self) -> bool:
        """Nothing is drawn: the best token is taken, edited logits or not."""
        return self.params.temperature < GREEDY_BELOW or self.params.top_k == 1

    @property
    def inverse_temperature(self) -> float | None:
        """For what the next token needs `StepOutput.read_sums`; None: it needs none.

        top_k and min_p leave few tokens whatever the others sum up to, and a grammar changes too
        many logits for the device's sums to hold.
        """
        params = self.params
        few = params.top_k is not None or (params.min_p > 0 and params.top_p >= 1)
        if self.is_greedy or few or self.guide is not None:
            return None
        return 1 / params.temperature

    def accept(self, token: int) -> None:
        """Tell that `token` was generated."""
        self.num_generated += 1
        if self.has_penalties:
            self.counts.add(token)
        if self.guide is not None and token not in self.stop_ids:
            self.guide.accept(token)

    @property
    def is_complete(self) -> bool:
        """The grammar, if there is one, lets nothing follow."""
        return self.guide is not None and self.guide.is_complete

    @property
    def barred(self) -> frozenset[int]:
        """Tokens that must not end the text now."""
        early = self.num_generated < self.params.min_tokens
        return self.stop_ids if early else self.barred_ends


class Sample(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None


@np.errstate(over="ignore")  # logit / temperature may overflow to -inf, whose weight is 0
def sample(
    logits: F32 | None,
    best: int,
    state: SamplerState,
    sums: F32 | None = None,
    unit_sums: F32 | None = None,
) -> Sample | None:
    """Choose the next token of one row (V,), whose highest finite logit is at `best`.

    `logits` may be None if `state.takes_best`. `sums` and `unit_sums` are the row's (K,) of
    `StepOutput.read_sums`, for `state.inverse_temperature` and for 1, which logprobs ask for; those
    that are None are made here.

    None: min_tokens and the stop tokens leave nothing to choose from.

    Raises:
        GuideError: the grammar met a limit.
    """
    if state.takes_best:
        return Sample(best, None)
    assert logits is not None
    params = state.params
    edited: _Edited | None = None
    token = best
    if state.edits_logits:
        edited = _edit(logits, state)
        token = int(edited.logits.argmax())
        if not np.isfinite(edited.logits[token]):
            return None
    if not state.is_greedy:
        softmax = Softmax(logits if edited is None else edited.logits, token, params.temperature)
        whole = None if sums is None else sums.astype(np.float64)
        if whole is not None and edited is not None:
            whole = _sums_after(whole, Softmax(logits, best, params.temperature), edited, softmax)
        token = draw(softmax, params, uniform(state.seed, state.num_generated), whole)
    if params.logprobs is None:
        return Sample(token, None)
    return Sample(token, token_logprobs(logits, best, token, params.logprobs, unit_sums))


def token_logprobs(
    logits: F32, best: int, token: int, count: int, sums: F32 | None = None
) -> TokenLogprobs:
    """log softmax of (V,), whose highest is at `best`, at `token`, and the `count` best; equal ones
    in order of their ids. `sums` as the `unit_sums` of `sample`."""
    if sums is None:
        total = float(Softmax(logits, best, 1).sums().sum())
    else:
        total = float(sums.sum(dtype=np.float64))
    log_total = float(logits[best]) + math.log(total)
    top: tuple[tuple[int, float], ...] = ()
    count = min(count, len(logits))
    if count:
        ids = top_k(logits, count)
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        values = (logits[ids].astype(np.float64) - log_total).tolist()
        top = tuple(zip(ids.tolist(), values, strict=True))
    return TokenLogprobs(logprob=float(logits[token]) - log_total, top=top)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a pure function of its arguments.

    The first word of Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC11) with key (seed, 0) and counter (position, 0, 0, 0). Spelt out because setting up numpy's
    generator costs several times as much as the one draw that is needed.
    """
    c0, c1, c2, c3 = position, 0, 0, 0
    k0, k1 = seed, 0
    for _ in range(10):
        p0 = 0xD2E7470EE14C6C93 * c0
        p1 = 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & _MASK64, (p0 >> 64) ^ c3 ^ k1, p0 & _MASK64
        k0 = (k0 + 0x9E3779B97F4A7C15) & _MASK64
        k1 = (k1 + 0xBB67AE8584CAA73B) & _MASK64
    return (c0 >> 11) * 2.0**-53


class _Edited(NamedTuple):
    """Logits that were changed."""

    logits: F32
    """(V,)"""
    blocks: F32
    """The same memory, (K, SUM_BLOCK), with -inf behind the last logit."""
    tokens: Ids
    """Those whose logit may have changed; with a grammar, not all of them."""


def _edit(logits: F32, state: SamplerState) -> _Edited:
    """Penalties, logit_bias, the grammar and the ban on tokens that must not end it, on a copy.

    repetition: of prompt and output, logits > 0 divided and others multiplied (CTRL, Keskar et al.
    2019); frequency and presence: of the output, subtracted per occurrence and once (OpenAI).
    """
    params = state.params
    blocks = np.empty((-(-len(logits) // SUM_BLOCK), SUM_BLOCK), np.float32)
    flat = blocks.reshape(-1)
    edited = flat[: len(logits)]
    edited[:] = logits
    flat[len(logits) :] = -np.inf
    changed = []
    if state.has_penalties:
        ids, counts = state.counts.arrays()
        values = edited[ids]
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0)
        edited[ids] = values
        changed.append(ids)
    if state.bias is not None:
        edited[state.bias[0]] += state.bias[1]
        changed.append(state.bias[0])
    if state.guide is not None:
        np.copyto(edited, -np.inf, where=~state.guide.allowed())
    if barred := list(state.barred):
        ends = edited[barred]
        edited[barred] = -np.inf
        if state.guide is not None and edited.max() == -np.inf:
            edited[barred] = ends  # the grammar allows nothing but the end
        changed.append(np.array(barred, np.intp))
    return _Edited(edited, blocks, np.concatenate(changed) if changed else np.empty(0, np.intp))


def _sums_after(sums: F64, before: Softmax, edited: _Edited, after: Softmax) -> F64 | None:
    """The sums (K,) of `after`, the edited logits, from those of `before`.

    What a token had is taken from its block's sum, and what it has now added. A block of which that
    takes the larger part is added up again: of the rest, the sum would have few digits. None where
    that is so of the whole row.
    """
    lift = (float(before.peak) - float(after.peak)) * float(after.scale)
    if lift > MAX_LIFT:
        return None
    tokens = np.unique(edited.tokens)
    blocks = tokens // SUM_BLOCK
    had = np.bincount(blocks, before.weights(before.logits[tokens]), len(sums))
    has = np.bincount(blocks, after.weights(edited.logits[tokens]), len(sums))
    result = (sums - had) * math.exp(lift) + has
    again = np.flatnonzero(had > 0.5 * sums)
    result[again] = after.weights(edited.blocks[again]).sum(axis=1)
    return result
