"""Drawing a token from one row of logits: top_k, top_p, min_p, then the distribution function.

Of a whole vocabulary, each pass over the row counts, and that of the exponentials most. So the
device adds them up, block by block, and here only those of tokens that may be drawn are computed.

Legend: V vocabulary, K = ceil(V / SUM_BLOCK) blocks of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shark_llm.artifacts.manifest import SUM_BLOCK
from shark_llm.engine.request import SamplingParams

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

FEW = 1024
"""Weights that are sorted, or summed one by one; more are halved first, or summed in blocks."""

Likely = Callable[[float], tuple[Ids, F32]]
"""Tokens, ascending, and their weights: of all whose weight is above a floor."""


class Softmax:
    """Weights exp((logit - peak) / temperature) of a row (V,), whose best logit, `peak`, is at
    `best`."""

    def __init__(self, logits: F32, best: int, temperature: float) -> None:
        self.logits = logits
        self.best = best
        self.peak = logits[best]
        self.scale = np.float32(1 / temperature)

    def weights(self, logits: F32) -> F32:
        """Of some logits, in an array of its own."""
        weights: F32 = np.subtract(logits, self.peak)
        np.multiply(weights, self.scale, out=weights)  # may overflow to -inf, whose weight is 0
        return np.exp(weights, out=weights)

    def above(self, floor: float) -> tuple[Ids, F32]:
        """`Likely` of the whole row; 0 gives all of it."""
        if not floor:
            return np.arange(len(self.logits)), self.weights(self.logits)
        edge = self.peak + np.float32(math.log(floor)) / self.scale
        ids = np.flatnonzero(self.logits >= edge)
        return ids, self.weights(self.logits.take(ids))

    def sums(self) -> F64:
        """(K,) of the weights of each block."""
        starts = np.arange(0, len(self.logits), SUM_BLOCK)
        return np.add.reduceat(self.weights(self.logits), starts).astype(np.float64)

    def invert(self, sums: F64, u: float) -> int:
        """The token at which the running sum of the weights passes `u` times the whole, given the
        `sums` of each block."""
        running = np.cumsum(sums)
        target = u * float(running[-1])
        block = min(int(np.searchsorted(running, target, side="right")), len(running) - 1)
        begin = block * SUM_BLOCK
        weights = self.weights(self.logits[begin : begin + SUM_BLOCK])
        if not weights.any():  # a block of next to nothing, which the device rounded another way
            return self.best
        return begin + _locate(weights, target - float(running[block] - sums[block]))


def draw(softmax: Softmax, params: SamplingParams, u: float, sums: F64 | None = None) -> int:
    """What top_k, top_p and min_p leave, then the token at `u` of the distribution function.

    `sums` are those of `softmax`, if somebody has made them already.
    """
    logits = softmax.logits
    head: Ids | None = None
    if params.top_k is not None and params.top_k < len(logits):
        head = top_k(logits, params.top_k)
    elif params.min_p > 0 and params.top_p >= 1:  # the rest is dropped without knowing its sum
        head = np.flatnonzero(logits >= softmax.peak + math.log(params.min_p) / softmax.scale)
    if head is not None:
        weights = softmax.weights(logits.take(head))
        if params.top_p < 1:
            total = float(weights.sum(dtype=np.float64))
            kept, weights = _nucleus(_above(weights), params.top_p, total, len(weights))
            head = head.take(kept)
        return _choose(head, weights, params, u)
    if sums is None:
        sums = softmax.sums()
    if params.top_p >= 1:
        return softmax.invert(sums, u)
    ids, weights = _nucleus(softmax.above, params.top_p, float(sums.sum()), len(logits))
    return _choose(ids, weights, params, u)


def top_k(values: F32, k: int) -> Ids:
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


def _choose(ids: Ids, weights: F32, params: SamplingParams, u: float) -> int:
    """Apply min_p to tokens with their weights, and draw one of them with `u`."""
    if params.min_p > 0:
        likely = np.flatnonzero(weights >= np.float32(params.min_p) * weights.max())
        ids, weights = ids.take(likely), weights.take(likely)
    return int(ids[_locate(weights, u * float(weights.sum(dtype=np.float64)))])


def _above(weights: F32) -> Likely:
    """`Likely` of a row of weights."""

    def above(floor: float) -> tuple[Ids, F32]:
        ids = np.flatnonzero(weights >= floor)
        return ids, weights.take(ids)

    return above


def _nucleus(likely: Likely, top_p: float, total: float, count: int) -> tuple[Ids, F32]:
    """The smallest set of largest of `count` weights that sum up to `top_p` of their `total`, 0 to
    1: indices, ascending, and weights.

    At least one; of equal ones at the edge those with the lowest index.
    """
    target = top_p * total
    # All that is below a floor of `spare / count` is less than what may be left out. Most of it is
    # far below: of real logits, the smallest that is kept has been 6 times the floor or more, and
    # 24 times at the usual temperatures. 0: all, where rounding lets no sum reach the target.
    spare = total - target
    for times in (24, 6, 1, 0):
        ids, pool = likely(min(1.0, times * spare / count))
        if float(pool.sum(dtype=np.float64)) >= target:
            break
    edge, taken = _edge(pool, target)
    kept = np.flatnonzero(pool >= edge)
    beyond = len(kept) - taken
    if beyond:
        ties = np.flatnonzero(pool.take(kept) == edge)
        kept = np.delete(kept, ties[-beyond:])
    return ids.take(kept), pool.take(kept)


def _edge(weights: F32, target: float) -> tuple[np.float32, int]:
    """Of the largest weights that sum up to `target`: the smallest, and how many they are."""
    taken = 0
    while len(weights) > FEW:  # as quickselect does, for a sum in place of a rank
        half = len(weights) // 2
        weights = np.partition(weights, half)
        upper = weights[half:]
        mass = float(upper.sum(dtype=np.float64))
        if mass >= target:
            weights = upper
        else:
            weights, target, taken = weights[:half], target - mass, taken + len(upper)
    ranked = np.sort(weights)[::-1]
    rank = _locate(ranked, target)
    return ranked[rank], taken + rank + 1


def _locate(weights: F32, target: float) -> int:
    """The index, of a weight > 0, at which the running sum passes `target`.

    Of many in blocks: one running sum over all of them is ten times as slow.
    """
    begin, inner = 0, weights
    if len(weights) > FEW:
        starts = np.arange(0, len(weights), SUM_BLOCK)
        blocks = np.add.reduceat(weights, starts).cumsum(dtype=np.float64)
        block = min(int(blocks.searchsorted(target, side="right")), len(blocks) - 1)
        begin = block * SUM_BLOCK
        inner = weights[begin : begin + SUM_BLOCK]
        if block:
            target -= float(blocks[block - 1])
    running = inner.cumsum(dtype=np.float64)
    index = begin + min(int(running.searchsorted(target, side="right")), len(running) - 1)
    if weights[index] > 0:
        return index
    # Rounding led to the zeros behind the last weight of the block.
    return int(np.flatnonzero(weights[: index + 1])[-1])
