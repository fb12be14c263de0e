"""What the rows of a step need to know of sums over the vocabulary, asked of the device at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shark_llm.engine.drawing import F32
from shark_llm.engine.scheduler import ScheduledRow
from shark_llm.runtime.runner import StepOutput


class RowSums:
    """`StepOutput.read_sums` of those rows that draw from sums or are asked for logprobs.

    Logprobs are at temperature 1: a second run is needed only for rows that also draw at another.
    """

    def __init__(self, output: StepOutput, rows: Sequence[ScheduledRow]) -> None:
        self._draws = [row.inverse_temperature for row in rows]
        ones = [1.0 if row.needs_logprobs else None for row in rows]
        first = [one if draw is None else draw for draw, one in zip(self._draws, ones, strict=True)]
        self._at_temperature = _read(output, first)
        self._asks = [one is not None for one in ones]
        again = any(asks and scale != 1 for asks, scale in zip(self._asks, first, strict=True))
        self._at_one = _read(output, ones) if again else self._at_temperature

    def drawing(self, row: int) -> F32 | None:
        """(K,) at the row's temperature, if it draws from them."""
        if self._at_temperature is None or self._draws[row] is None:
            return None
        return self._at_temperature[row]

    def logprobs(self, row: int) -> F32 | None:
        """(K,) at temperature 1, if it is asked for logprobs."""
        if self._at_one is None or not self._asks[row]:
            return None
        return self._at_one[row]


def _read(output: StepOutput, scales: Sequence[float | None]) -> list[F32] | None:
    if all(scale is None for scale in scales):
        return None
    return list(output.read_sums(np.array([scale or 1 for scale in scales], np.float32)))
