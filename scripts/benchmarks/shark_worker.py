"""This project's side: the bundle behind `IreeRunner.forward`, as the engine drives it.

Packing the rows, the upload, the module, and the download of the logits are in the timed step;
choosing the next token is not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing, worker
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.runtime.devices import DeviceConfig
from shark_llm.runtime.module import IreeRunner, load_runner
from shark_llm.runtime.runner import Phase, Row

FILL_TOKENS = 512
"""A context is filled by prefills of at most this many tokens."""


class SharkSide:
    """One loaded bundle, and the case being measured."""

    def __init__(self) -> None:
        self._runner: IreeRunner | None = None
        self._random = np.random.default_rng(0)
        self._phase: Phase = "decode"
        self._context = 0
        self._pages: list[list[int]] = []

    def open(self, bundle: str, device: str, kv_cache_tokens: int) -> None:
        """Load, as shark-serve does. Fails unless each core has exactly one device thread."""
        config = DeviceConfig(driver=device)
        self._runner = load_runner(open_bundle(Path(bundle)), config, kv_cache_tokens)
        cores, threads = len(os.sched_getaffinity(0)), device_threads()
        if device == "local-task" and threads != cores:
            raise RuntimeError(f"IREE made {threads} device threads for {cores} cores")

    def prepare(self, phase: Phase, batch: int, context: int, steps: int) -> dict[str, str]:
        """Give each row pages for `context` + `steps` tokens; for decode, fill its context."""
        runner = self._loaded
        self._phase, self._context = phase, context
        per_row = -(-(context + steps) // runner.page_size)
        assert 1 + batch * per_row <= runner.num_pages, "the pool is too small for this case"
        self._pages = [list(range(1 + i * per_row, 1 + (i + 1) * per_row)) for i in range(batch)]
        if phase == "decode":
            # Chunks begin at page boundaries.
            chunk = FILL_TOKENS // runner.page_size * runner.page_size
            for row in range(batch):
                for start in range(0, context, chunk):
                    count = min(chunk, context - start)
                    runner.forward("prefill", [self._row(row, start, count)])
        return {}

    def round(self, steps: int, warmup: int) -> dict[str, Any]:
        """Decode steps behind the context, or prefills of it, all rows at once."""
        runner, rows = self._loaded, range(len(self._pages))
        if self._phase == "prefill":
            # Tokens are drawn before the clock starts.
            prompts = [
                [self._row(i, 0, self._context) for i in rows] for _ in range(steps + warmup)
            ]
        else:
            prompts = [
                [self._row(i, self._context + step, 1) for i in rows]
                for step in range(steps + warmup)
            ]
        return timing.timed(
            lambda step: void(runner.forward(self._phase, prompts[step])),
            steps=steps,
            warmup=warmup,
        )

    def close(self) -> None:
        """Free the device's memory."""
        if self._runner is not None:
            self._runner.close()

    @property
    def _loaded(self) -> IreeRunner:
        assert self._runner is not None, "open comes first"
        return self._runner

    def _row(self, row: int, start: int, count: int) -> Row:
        runner = self._loaded
        tokens = self._random.integers(100, runner.vocab_size, count).tolist()
        used = -(-(start + count) // runner.page_size)
        return Row(tokens=tokens, start=start, pages=self._pages[row][:used])


def device_threads() -> int:
    """The IREE runtime's worker threads in this process."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("iree-worker") for name in names)


def void(_: object) -> None:
    """Drop a result."""


if __name__ == "__main__":
    side = SharkSide()
    worker.serve(
        {"open": side.open, "prepare": side.prepare, "round": side.round, "close": side.close}
    )
