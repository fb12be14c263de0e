"""A ModelRunner without a model, strict about the protocol and honest about pages.

The next token is a function of the whole token history, and the history is read back from the
runner's own paged store by the page ids of the row: a wrong page, a wrong start or a page that was
overwritten gives other tokens than the request alone would give. Everything that the protocol in
`shark_llm.runtime.runner` demands of the caller is asserted. `num_reads` counts reads of logits,
and `num_sums` those of sums.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shark_llm.artifacts.manifest import SUM_BLOCK
from shark_llm.runtime.runner import Phase, Row, StepOutput

POISON = -1
"""What a page holds before anything is written to it."""
SCRATCH = -2
"""What page 0 holds: unused batch rows write there."""


def best_tokens(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The argmax of each row; V where it is not finite, which a NaN anywhere makes it."""
    best = logits.argmax(axis=1)
    finite = np.isfinite(logits[np.arange(len(best)), best])
    return np.where(finite, best, logits.shape[1])


def softmax_sums(
    logits: npt.NDArray[np.float32], inverse_temperatures: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """As `StepOutput.read_sums` says; NaN in rows that have no best token."""
    assert inverse_temperatures.shape == (len(logits),)
    highest = logits.max(axis=1, keepdims=True).astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights = np.exp((logits - highest) * inverse_temperatures[:, None])
    starts = np.arange(0, logits.shape[1], SUM_BLOCK)
    return np.add.reduceat(weights, starts, axis=1).astype(np.float32)


class FakeRunner:
    """Deterministic `ModelRunner`.

    `next_token(history)`, if given, forces the best token (50 above all others); otherwise logits
    are pseudo-random numbers keyed by the history. `on_forward(index, phase, rows)` is called at
    the start of each forward and may sleep, block or raise; when it raises, the pages that the
    rows would have written are poisoned, as a device that failed half-way leaves them. Rows for
    which `nan(row)` is true return NaN. `calls` records every forward if `record` is set.
    """

    def __init__(
        self,
        *,
        page_size: int = 16,
        num_pages: int = 64,
        vocab_size: int = 256,
        max_model_len: int = 512,
        prefill_batch_sizes: tuple[int, ...] = (1, 4),
        decode_batch_sizes: tuple[int, ...] = (1, 4, 8),
        next_token: Callable[[Sequence[int]], int] | None = None,
        on_forward: Callable[[int, Phase, Sequence[Row]], None] | None = None,
        nan: Callable[[Row], bool] | None = None,
        step_seconds: float = 0.0,
        record: bool = False,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.prefill_batch_sizes = prefill_batch_sizes
        self.decode_batch_sizes = decode_batch_sizes
        self.next_token = next_token
        self.on_forward = on_forward
        self.nan = nan
        self.step_seconds = step_seconds
        self.record = record
        self.calls: list[tuple[Phase, tuple[Row, ...]]] = []
        self.num_calls = 0
        self.num_reads = 0
        self.num_sums = 0
        self.device_seconds = 0.0
        self.closed = False
        self._busy = False
        self._store = np.full((num_pages, page_size), POISON, np.int64)
        self._store[0] = SCRATCH
        rng = np.random.default_rng(20240229)
        self._table = rng.standard_normal((61, vocab_size)).astype(np.float32) * 2
        self._logits = np.empty(
            (max(prefill_batch_sizes + decode_batch_sizes), vocab_size), np.float32
        )

    def run(self, phase: Phase, rows: Sequence[Row]) -> StepOutput:
        assert not self.closed, "run after close"
        assert not self._busy, "two callers at once"
        self._busy = True
        began = time.perf_counter()
        try:
            logits = self._forward(phase, rows)
        finally:
            self.device_seconds += time.perf_counter() - began
            self._busy = False
        return self.output(logits)

    def output(self, logits: npt.NDArray[np.float32]) -> StepOutput:
        """What a device returns that computed these logits. Later steps overwrite them."""
        step = self.num_calls

        def read() -> npt.NDArray[np.float32]:
            assert self.num_calls == step, "the logits of an earlier step"
            self.num_reads += 1
            return logits

        def add_up(inverse_temperatures: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            assert self.num_calls == step, "the logits of an earlier step"
            self.num_sums += 1
            return softmax_sums(logits, inverse_temperatures)

        return StepOutput(best_tokens=best_tokens(logits), read_logits=read, read_sums=add_up)

    def close(self) -> None:
        self.closed = True

    def logits_after(self, history: Sequence[int]) -> npt.NDArray[np.float32]:
        """The reference: logits (V,) f32 after a history, without any pages."""
        key = zlib.crc32(np.asarray(history, np.int64).tobytes())
        logits = self._table[key % len(self._table)].copy()
        logits[(key // len(self._table)) % self.vocab_size] += 6.0
        if self.next_token is not None:
            logits[self.next_token(history)] = logits.max() + 50.0
        return logits

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The reference: what greedy decoding gives after a prompt, alone."""
        history = list(prompt)
        for _ in range(num_tokens):
            history.append(int(self.logits_after(history).argmax()))
        return history[len(prompt) :]

    def _forward(self, phase: Phase, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
        sizes = self.prefill_batch_sizes if phase == "prefill" else self.decode_batch_sizes
        assert 1 <= len(rows) <= max(sizes), f"{len(rows)} rows, compiled for {sizes}"
        written = self._check(phase, rows)
        index = self.num_calls
        self.num_calls += 1
        if self.record:
            self.calls.append((phase, tuple(rows)))
        try:
            if self.on_forward is not None:
                self.on_forward(index, phase, rows)
        except BaseException:
            self._store[sorted(written)] = POISON
            raise
        if self.step_seconds:
            time.sleep(self.step_seconds)
        for i, row in enumerate(rows):
            pages = self._store[list(row.pages)]  # (pages, page_size), a copy
            history = pages.reshape(-1)
            end = row.start + len(row.tokens)
            history[row.start : end] = row.tokens
            assert (history[:end] >= 0).all(), f"row {i} reads a position that was never written"
            first = row.start // self.page_size
            self._store[list(row.pages[first:])] = pages[first:]
            self._logits[i] = self.logits_after(history[:end].tolist())
            if self.nan is not None and self.nan(row):
                self._logits[i] = np.nan
        self._store[0] = SCRATCH
        return self._logits[: len(rows)]

    def _check(self, phase: Phase, rows: Sequence[Row]) -> set[int]:
        """Assert the protocol; return the pages that the rows write."""
        page_size = self.page_size
        writes: set[int] = set()
        for i, row in enumerate(rows):
            end = row.start + len(row.tokens)
            pages = list(row.pages)
            assert len(row.tokens) >= 1, f"row {i} is empty"
            assert row.start >= 0, f"row {i}: {row.start}..{end}"
            assert end <= self.max_model_len, f"row {i}: {row.start}..{end}"
            assert all(0 <= token < self.vocab_size for token in row.tokens), f"row {i}: bad token"
            assert len(pages) == -(-end // page_size), f"row {i}: {len(pages)} pages, {end} tokens"
            assert len(set(pages)) == len(pages), f"row {i} lists a page twice: {pages}"
            assert all(0 < page < self.num_pages for page in pages), f"row {i}: pages {pages}"
            if phase == "decode":
                assert len(row.tokens) == 1, f"decode row {i} has {len(row.tokens)} tokens"
            else:
                assert row.start % page_size == 0, f"prefill row {i} starts at {row.start}"
            own = set(pages[row.start // page_size :])
            assert not own & writes, f"row {i} writes a page that another row writes"
            writes |= own
        for i, row in enumerate(rows):
            read = set(row.pages[: row.start // page_size])
            assert not read & writes, f"row {i} reads a page that a row of this step writes"
        return writes
