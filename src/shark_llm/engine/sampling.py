"""From logits to the next token.

All arithmetic of a row depends on that row alone: numpy works along the vocabulary, and randomness
is a function of (seed, number of tokens generated so far). So a seeded request draws the same
tokens alone, in any row of any batch, after a preemption and with a warm cache, given the same
logits.

Legend: B rows of a forward, V vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shark_llm.engine.request import SamplingParams, TokenLogprobs

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

GREEDY_BELOW = 1e-20
"""Temperatures under this are the limit, greedy: dividing by them would leave the range of f32."""
FIRST_FLOOR, LAST_FLOOR, STEP_DOWN = 1e-3, 1e-12, 16
"""Where the search for the tokens of top_p begins and ends, of the best one's weight, and by what
factor the floor sinks."""
SUM_BLOCK = 256
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
        params = self.params
        greedy = params.temperature < GREEDY_BELOW or params.top_k == 1
        return greedy and params.logprobs is None and not self.edits_logits

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


def sample(logits: F32 | None, best: int, state: SamplerState) -> Sample | None:
    """Choose the next token of one row (V,), whose highest finite logit is at `best`.

    `logits` may be None if `state.takes_best`.

    None: min_tokens and the stop tokens leave nothing to choose from.

    Raises:
        GuideError: the grammar met a limit.
    """
    if state.takes_best:
        return Sample(best, None)
    assert logits is not None
    params = state.params
    edited = logits
    if state.edits_logits:
        edited = _edit(logits, state)
        best = int(edited.argmax())
        if not np.isfinite(edited[best]):
            return None
    token = best
    if params.temperature >= GREEDY_BELOW and params.top_k != 1:
        token = _draw(edited, best, params, uniform(state.seed, state.num_generated))
    if params.logprobs is None:
        return Sample(token, None)
    return Sample(token, token_logprobs(logits, token, params.logprobs))


def token_logprobs(logits: F32, token: int, count: int) -> TokenLogprobs:
    """log softmax of (V,) at `token`, and the `count` best; equal ones in order of their ids."""
    peak = logits.max()
    log_total = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    count = min(count, len(logits))
    if count:
        ids = _top_k(logits, count)
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


def _edit(logits: F32, state: SamplerState) -> F32:
    """Penalties, logit_bias, the grammar and the ban on tokens that must not end it, on a copy.

    repetition: of prompt and output, logits > 0 divided and others multiplied (CTRL, Keskar et al.
    2019); frequency and presence: of the output, subtracted per occurrence and once (OpenAI).
    """
    params = state.params
    edited = logits.copy()
    if state.has_penalties:
        ids, counts = state.counts.arrays()
        values = edited[ids]
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0)
        edited[ids] = values
    if state.bias is not None:
        edited[state.bias[0]] += state.bias[1]
    if state.guide is not None:
        edited = np.where(state.guide.allowed(), edited, np.float32(-np.inf))
    if barred := list(state.barred):
        ends = edited[barred]
        edited[barred] = -np.inf
        if state.guide is not None and edited.max() == -np.inf:
            edited[barred] = ends  # the grammar allows nothing but the end
    return edited


def _draw(logits: F32, best: int, params: SamplingParams, u: float) -> int:
    """Temperature, top_k, top_p, min_p, then the token at `u` of the distribution function.

    Of a whole vocabulary, each pass over the row counts: one to subtract, one to divide, one for
    the exponentials, in one array, and one for the sums. To pick out the likely tokens first would
    cost more than it saves: of real logits, most are not far enough from the best to be left out.
    """
    temperature = np.float32(params.temperature)
    head: Ids | None = None
    if params.top_k is not None and params.top_k < len(logits):
        head = _top_k(logits, params.top_k)
    elif params.min_p > 0 and params.top_p >= 1:  # the rest is dropped without knowing its sum
        head = np.flatnonzero(logits >= logits[best] + np.log(params.min_p) * temperature)
    with np.errstate(over="ignore"):  # to -inf, whose weight is 0
        weights = (logits if head is None else logits.take(head)) - logits[best]
        weights /= temperature
    np.exp(weights, out=weights)
    index = _choose(weights, params, u)
    return index if head is None else int(head[index])


def _choose(weights: F32, params: SamplingParams, u: float) -> int:
    """Apply top_p and min_p to weights whose largest is 1, and draw an index with `u`."""
    kept: Ids | None = None
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p * float(weights.sum()))
        weights = weights.take(kept)
    if params.min_p > 0:
        likely = np.flatnonzero(weights >= np.float32(params.min_p))
        kept = likely if kept is None else kept[likely]
        weights = weights.take(likely)
    index = _invert(weights, u)
    return index if kept is None else int(kept[index])


def _top_k(values: F32, k: int) -> Ids:
    """Indices of the k largest, ascending; of equal ones at the edge those with lowest index."""
    if k >= len(values):
        return np.arange(len(values))
    ids: Ids | None = None
    if 2 * k * SUM_BLOCK <= len(values):
        # The k-th largest of the blocks' best is no more than the k-th largest of all.
        peaks = np.maximum.reduceat(values, np.arange(0, len(values), SUM_BLOCK))
        ids = np.flatnonzero(values >= np.partition(peaks, len(peaks) - k)[len(peaks) - k])
    pool = values if ids is None else values[ids]
    edge = np.partition(pool, len(pool) - k)[len(pool) - k]
    kept = np.flatnonzero(pool >= edge)
    if len(kept) > k:
        above = kept[pool[kept] > edge]
        kept = np.sort(np.concatenate([above, kept[pool[kept] == edge][: k - len(above)]]))
    return kept if ids is None else ids[kept]


def _nucleus(weights: F32, target: float) -> Ids:
    """Indices, ascending, of the smallest set of largest weights that sum up to `target`.

    At least one; of equal ones at the edge those with the lowest index. Only weights above a floor
    are sorted: it sinks until they are enough, and real logits need few of them.
    """
    floor = FIRST_FLOOR
    while True:
        ids = np.flatnonzero(weights > floor)
        pool = weights.take(ids)
        if float(pool.sum()) >= target:
            break
        if floor < LAST_FLOOR:  # a target that rounding lets no sum reach
            ids, pool = np.arange(len(weights)), weights
            break
        floor /= STEP_DOWN
    ranked = np.sort(pool)[::-1]
    rank = _locate(ranked, _block_sums(ranked), target)
    edge = ranked[rank]
    kept = np.flatnonzero(pool >= edge)
    # Of those equal to the edge as many as were taken from the sorted pool, which has them all.
    beyond = len(kept) - (rank + 1)
    if beyond:
        ties = kept[pool.take(kept) == edge]
        kept = np.setdiff1d(kept, ties[-beyond:], assume_unique=True)
    return ids.take(kept)


def _invert(weights: F32, u: float) -> int:
    """The index at which the running sum of `weights` passes `u` times the whole."""
    blocks = _block_sums(weights)
    return _locate(weights, blocks, u * float(blocks[-1]))


def _block_sums(weights: F32) -> npt.NDArray[np.float64]:
    """The running sums up to the end of each block of `SUM_BLOCK` weights.

    One over each weight of a whole vocabulary is ten times as slow.
    """
    starts = np.arange(0, len(weights), SUM_BLOCK)
    return np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)


def _locate(weights: F32, blocks: npt.NDArray[np.float64], target: float) -> int:
    """The index, of a weight > 0, at which the running sum passes `target`.

    `blocks` are the weights' `_block_sums`: the block is found first, then the place in it.
    """
    block = min(int(np.searchsorted(blocks, target, side="right")), len(blocks) - 1)
    begin = block * SUM_BLOCK
    inner = np.cumsum(weights[begin : begin + SUM_BLOCK], dtype=np.float64)
    if block:
        target -= blocks[block - 1]
    index = begin + min(int(np.searchsorted(inner, target, side="right")), len(inner) - 1)
    if weights[index] > 0:
        return index
    # Rounding led to the zeros behind the last weight of the block.
    return int(np.flatnonzero(weights[: index + 1])[-1])
