"""The sides of `serve`: each takes the same loads, on the same cores.

A side may come in several forms, as llama-server with one KV cache for all its streams or one for
each: which is faster depends on the case, so the warm-up round tries all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from benchmarks import load, openvino_peer, servers, timing
from benchmarks.results import OPENVINO, OURS, LoadRound, percentile
from benchmarks.servers import Server
from benchmarks.worker import Worker, on_cpus


class Side(Protocol):
    """What is put under load."""

    name: str
    """OURS, or a peer's."""
    form: str
    """Which of the side's forms, for the reader."""

    def round(self, asked: load.Load) -> LoadRound:
        """One load from its first request to its last token."""
        ...


class ServerSide:
    """A server, asked over HTTP by a client on the other cores where there are any."""

    def __init__(self, server: Server, cpus: Sequence[int], form: str = "") -> None:
        self.name, self.form = server.side, form
        self._server, self._cpus = server, cpus

    def round(self, asked: load.Load) -> LoadRound:
        server, allowed = self._server, os.sched_getaffinity(0)
        with on_cpus(allowed - set(self._cpus) or allowed):
            busy, own = timing.machine_busy_seconds(), time.process_time()
            spent = server.cpu_seconds()
            before = servers.metrics(server.port) if self.name == OURS else {}
            answers, seconds = load.run(servers.HOST, server.port, asked)
            spent = server.cpu_seconds() - spent
            others = timing.machine_busy_seconds() - busy - spent - (time.process_time() - own)
            wait = device_wait(before, servers.metrics(server.port)) if before else None
        return load_round(answers, seconds, cpu=spent, others=others, wait=wait)


class OpenVinoSide:
    """OpenVINO GenAI's continuous batching in a process of its own, without a server around it."""

    name = OPENVINO

    def __init__(self, worker: Worker, opened: Mapping[str, str]) -> None:
        self._worker = worker
        self.form = opened["form"]

    def round(self, asked: load.Load) -> LoadRound:
        busy = timing.machine_busy_seconds()
        answer: dict[str, Any] = self._worker.call(
            "load",
            prompts=list(load.prompts(asked)),
            concurrency=asked.concurrency,
            max_tokens=asked.max_tokens,
        )
        others = timing.machine_busy_seconds() - busy - answer["cpu_s"]
        answers = [
            load.Answer(output_tokens=a["output_tokens"], sent=a["sent"], events=tuple(a["events"]))
            for a in answer["answers"]
        ]
        return load_round(answers, answer["wall_s"], cpu=answer["cpu_s"], others=others)


@contextmanager
def openvino(
    dtype: str, cpus: Sequence[int], *, kv_cache_tokens: int, step_tokens: int | None = None
) -> Iterator[tuple[Worker, dict[str, str]]]:
    """OpenVINO's worker with the model loaded, and what it says of itself."""
    model = openvino_peer.model(dtype)
    with Worker("openvino_worker", python=openvino_peer.python(), cpus=cpus) as worker:
        yield (
            worker,
            worker.call(
                "open",
                model=str(model),
                threads=len(cpus),
                forms=openvino_peer.FORMS[dtype],
                kv_cache_tokens=kv_cache_tokens,
                step_tokens=step_tokens,
            ),
        )
        worker.call("close")


def load_round(
    answers: Sequence[load.Answer],
    seconds: float,
    *,
    cpu: float,
    others: float,
    wait: float | None = None,
) -> LoadRound:
    """What a round keeps of its answers. `others`: CPU seconds that other processes took."""
    gaps = [gap * 1e3 for answer in answers for gap in answer.gaps] or [0.0]
    return LoadRound(
        output_tokens=sum(answer.output_tokens for answer in answers),
        wall_s=round(seconds, 4),
        ttft_ms=[round(answer.ttft * 1e3, 1) for answer in answers],
        tpot_ms=[round(answer.tpot * 1e3, 2) for answer in answers],
        gap_p50_ms=round(percentile(gaps, 0.5), 2),
        gap_p95_ms=round(percentile(gaps, 0.95), 2),
        server_cpu_s=round(cpu, 2),
        others=round(min(1.0, max(0.0, others / seconds / (os.cpu_count() or 1))), 3),
        load=round(os.getloadavg()[0], 2),
        device_wait=wait,
    )


def device_wait(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Between two looks at our metrics."""
    step, forward = (
        after[name] - before[name]
        for name in ("shark_engine_step_seconds_total", "shark_engine_forward_seconds_total")
    )
    return round(1 - forward / step, 4)
