"""OpenVINO GenAI's side: its continuous batching, in that package's environment.

A step is `ContinuousBatchingPipeline.step`: its own scheduling, the forward and the choice of the
tokens, on requests that were added before the clock started. A load is the same closed loop that
the servers get, without HTTP, text or JSON in between: what the pipeline itself can do.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found]  # only in its own environment
import openvino_genai as genai  # type: ignore[import-not-found]

from benchmarks import timing, worker

PAGE = 32
"""Tokens of a block of the KV cache on a CPU."""
TRIAL_STREAMS, TRIAL_PROMPT, TRIAL_TOKENS = 2, 64, 8


@dataclass(kw_only=True)
class Stream:
    """One request under way. Times are seconds of `time.perf_counter`."""

    handle: Any
    sent: float
    tokens: int = 0
    events: list[float] = field(default_factory=list)

    def read(self) -> bool:
        """Take what the last step brought; returns whether the request has ended."""
        if self.handle.can_read():
            outputs = self.handle.read().values()
            self.tokens += sum(len(output.generated_ids) for output in outputs)
            self.events.append(time.perf_counter())
        return bool(self.handle.get_status() != genai.GenerationStatus.RUNNING)


class OpenVinoSide:
    """One exported model, and the case being measured."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._ids = itertools.count()
        self._pipeline: Any = None
        self._vocab_size = 0
        self._phase = "decode"
        self._rows = self._tokens = 0
        self._kept: list[Stream] = []
        """A request whose handle is let go is dropped, silently."""

    def open(
        self,
        model: str,
        threads: int,
        forms: list[tuple[str, str]],
        kv_cache_tokens: int,
        step_tokens: int | None = None,
    ) -> dict[str, str]:
        """Load; of the `forms`, precisions of the arithmetic and of the KV cache, keep the fastest.

        Those that this CPU lacks instructions for are left out. `step_tokens` is the most that a
        step takes in; None leaves the package's own default.
        """
        self._vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-2 * kv_cache_tokens // PAGE)  # its last pages are half empty
        scheduler.enable_prefix_caching = False
        if step_tokens is not None:
            scheduler.max_num_batched_tokens = step_tokens

        def load(form: tuple[str, str]) -> None:
            self.close()
            precision, kv_precision = form
            properties = {
                "INFERENCE_NUM_THREADS": threads,
                "INFERENCE_PRECISION_HINT": precision,
                "KV_CACHE_PRECISION": kv_precision,
            }
            self._pipeline = genai.ContinuousBatchingPipeline(
                model, scheduler_config=scheduler, device="CPU", properties=properties
            )

        trial: dict[tuple[str, str], float] = {}
        refused: Exception | None = None
        for precision, kv_precision in forms:
            form = precision, kv_precision
            try:
                load(form)
            except RuntimeError as error:  # no kernel for this CPU
                refused = error
            else:
                trial[form] = self._trial() if len(forms) > 1 else 0.0
        if not trial:
            raise RuntimeError(f"it takes none of the forms {forms}") from refused
        best = min(trial, key=lambda form: trial[form])
        load(best)
        return {
            "version": genai.__version__,
            "form": f"computes in {best[0]}, KV cache in {best[1]}",
        }

    def prepare(self, phase: str, batch: int, context: int, steps: int) -> dict[str, str]:
        """Set what `round` measures."""
        self._phase, self._rows, self._tokens = phase, batch, context
        return {}

    def round(self, steps: int, warmup: int) -> dict[str, Any]:
        """Decode steps behind the context, or prefills of it, all sequences at once."""
        self._kept = []
        if self._phase == "prefill":
            return timing.timed(
                lambda _: self._pipeline.step(),
                steps=steps,
                warmup=warmup,
                untimed=self._add_prompts,
            )
        streams = self._add(self._rows, max_tokens=steps + warmup + 1)
        while not all(stream.tokens for stream in streams):
            self._pipeline.step()
            for stream in streams:
                stream.read()
        assert all(stream.tokens == 1 for stream in streams), "one step takes in all prompts"
        result = timing.timed(lambda _: self._pipeline.step(), steps=steps, warmup=warmup)
        self._finish()
        return result

    def load(self, prompts: list[list[int]], concurrency: int, max_tokens: int) -> dict[str, Any]:
        """A closed loop of so many streams: the answers, seconds, and CPU seconds of this process.

        Times of an answer are seconds from the beginning.
        """
        waiting = list(prompts)
        live: list[Stream] = []
        ended: list[Stream] = []
        cpu, began = time.process_time(), time.perf_counter()
        while waiting or live:
            while waiting and len(live) < concurrency:
                live.append(self._request(waiting.pop(), max_tokens))
            self._pipeline.step()
            done = [stream for stream in live if stream.read()]
            if short := [stream.tokens for stream in done if stream.tokens != max_tokens]:
                raise RuntimeError(f"a request ended after {short[0]} of {max_tokens} tokens")
            ended += done
            live = [stream for stream in live if stream not in done]
        return {
            "wall_s": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu,
            "answers": [
                {
                    "output_tokens": s.tokens,
                    "sent": s.sent - began,
                    "events": [event - began for event in s.events],
                }
                for s in ended
            ],
        }

    def close(self) -> None:
        """Free the model."""
        self._kept = []
        self._pipeline = None

    def _trial(self) -> float:
        """Seconds of a small load, the best of three."""
        prompts = [self._prompt(TRIAL_PROMPT) for _ in range(TRIAL_STREAMS)]
        runs = [self.load(prompts, TRIAL_STREAMS, TRIAL_TOKENS) for _ in range(3)]
        return float(min(run["wall_s"] for run in runs))

    def _add_prompts(self, _: int) -> None:
        assert all(stream.handle.can_read() for stream in self._kept), "one step was enough"
        self._kept = self._add(self._rows, max_tokens=1)

    def _add(self, count: int, *, max_tokens: int) -> list[Stream]:
        return [self._request(self._prompt(self._tokens), max_tokens) for _ in range(count)]

    def _request(self, prompt: list[int], max_tokens: int) -> Stream:
        config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        ids = ov.Tensor(np.array([prompt], np.int64))
        sent = time.perf_counter()
        return Stream(handle=self._pipeline.add_request(next(self._ids), ids, config), sent=sent)

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(range(100, self._vocab_size), k=length)

    def _finish(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


if __name__ == "__main__":
    side = OpenVinoSide()
    worker.serve(
        {
            "open": side.open,
            "prepare": side.prepare,
            "round": side.round,
            "load": side.load,
            "close": side.close,
        }
    )
