"""The seam between engine and device: what the engine asks of a compiled model.

Legend: B rows of this step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One batch row of a step: `tokens` stand at positions start .. start + len(tokens) - 1.

    `pages` are the ids of the pages that hold positions 0 .. start + len(tokens) - 1, in order; the
    keys and values of positions below `start` are already in them. Page 0 is scratch and never
    listed.
    Decode rows have one token. A prefill row starts at a multiple of the page size.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step computed. Valid until the runner's next step."""

    best_tokens: npt.NDArray[np.int64]
    """(B,): the lowest token of the highest logit of each row; V where the row has a NaN, or no
    finite highest logit: nothing can be chosen from it."""
    read_logits: Callable[[], npt.NDArray[np.float32]]
    """Fetch (B, V) f32, the logits after each row's last token, from the device."""
    read_sums: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
    """Given 1 / temperature of each row (B,) f32, have the device add up exp((logit - the row's
    best) / temperature) over each `SUM_BLOCK` tokens, and fetch (B, ceil(V / SUM_BLOCK)) f32."""


class ModelRunner(Protocol):
    """A loaded model with its paged KV cache. Not thread-safe: one caller at a time."""

    page_size: int
    """Tokens of one page."""
    num_pages: int
    """Pages of the pool, page 0 (scratch) included."""
    vocab_size: int
    max_model_len: int
    """Most positions of a sequence."""
    prefill_batch_sizes: tuple[int, ...]
    """Compiled batch sizes, ascending."""
    decode_batch_sizes: tuple[int, ...]
    device_seconds: float
    """How long the device has worked so far. Preparing its inputs, and reading back what it
    returned, is not part of it: meanwhile the device waits."""

    def run(self, phase: Phase, rows: Sequence[Row]) -> StepOutput:
        """Run one step.

        Takes 1 .. max(batch sizes of the phase) rows and pads to the next compiled size. Writes the
        rows' keys and values into their pages. Blocks until the device is done, without the GIL.
        """
        ...

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        ...
