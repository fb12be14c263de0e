"""What a run leaves behind: every sample, and the facts to judge them by. Written as JSON.

The figures shown are medians: of the steps of a round, then of the rounds. A ratio is taken round
by round, between two sides that ran directly after each other; its median is shown with its range.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from shark_llm.errors import UsageError

OURS = "shark-llm"
PEER = "llama.cpp"
OPENVINO = "OpenVINO GenAI"
BENCHMARKS = {
    "decode": "one decode step, by batch size",
    "prefill": "one prefill, by prompt length",
    "context": "one decode step, by length of context",
    "serve": "shark-serve under load, beside its own module",
    "arrival": "a prompt that arrives while others decode, with and without chunked prefill",
    "prefix": "prompts with a common beginning, with and without the prefix cache",
    "start": "shark-serve from the start of its process to the first token",
    "build": "shark-compile from the checkpoint to a verified bundle",
}
Benchmark = Literal["decode", "prefill", "context", "serve", "arrival", "prefix", "start", "build"]


class Fact(BaseModel):
    """Base of all parts: immutable and strict about unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Machine(Fact):
    """Where it ran. `load`: the averages over 1, 5 and 15 minutes before the run."""

    cpu: str
    family: str
    cores: int
    threads: int
    virtual: bool
    caches: dict[str, str]
    features: list[str]
    memory_gib: float
    kernel: str
    load: list[float]


class Round(Fact):
    """Some steps of one side in a row."""

    wall_us: list[int]
    """Of each step."""
    cpu_us: int
    """Of the side's process, in all these steps."""
    others: float
    """The share of the machine's CPU time that other processes and guests took, 0 to 1."""
    load: float
    """The machine's load average (1 minute) at the end of the round."""

    @property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median(self.wall_us) / 1e6

    @property
    def cpu_seconds(self) -> float:
        """Of the mean step."""
        return self.cpu_us / len(self.wall_us) / 1e6


class Series(Fact):
    """All rounds of one side in one case. `detail`: what it chose or was told, by name."""

    side: str
    detail: dict[str, str] = {}
    rounds: list[Round]

    @property
    def seconds(self) -> float:
        """A step's time: the median over the rounds."""
        return statistics.median(r.seconds for r in self.rounds)

    @property
    def cpu_seconds(self) -> float:
        """A step's CPU time: the median over the rounds."""
        return statistics.median(r.cpu_seconds for r in self.rounds)

    @property
    def others(self) -> float:
        """The worst round's."""
        return max(r.others for r in self.rounds)


class StepCase(Fact):
    """One kind of step on so many cores: `batch` rows, each behind or of `context` tokens."""

    cores: int
    phase: Literal["prefill", "decode"]
    batch: int
    context: int
    bytes_read: int
    """Weights and KV that a step must read at least once: what the floor is made of."""
    series: list[Series]

    @property
    def tokens(self) -> int:
        """Tokens that one step takes in."""
        return self.batch * (self.context if self.phase == "prefill" else 1)

    def side(self, name: str) -> Series:
        return next(s for s in self.series if s.side == name)

    @property
    def peers(self) -> list[str]:
        """The names of the other sides."""
        return [s.side for s in self.series if s.side != OURS]

    def ratios(self, peer: str) -> list[float]:
        """How many times as fast as a peer we were, round by round."""
        ours, theirs = self.side(OURS).rounds, self.side(peer).rounds
        return paired_ratios([r.seconds for r in theirs], [r.seconds for r in ours])


class Bandwidth(Fact):
    """GB/s of so many cores, a value per round: STREAM's triad, and reading alone."""

    cores: int
    triad: list[float]
    read: list[float]

    @property
    def best(self) -> float:
        """The fastest that memory was seen to be: a floor must not be too high."""
        return max(*self.triad, *self.read)


class LoadRound(Fact):
    """One closed-loop load on a server. Lists are in milliseconds, a value per request or gap."""

    output_tokens: int
    wall_s: float
    ttft_ms: list[float]
    tpot_ms: list[float]
    """Per request: from its first to its last token, over the tokens between."""
    gap_p50_ms: float
    """Between two events of a stream."""
    gap_p95_ms: float
    server_cpu_s: float
    others: float
    load: float
    device_wait: float | None = None
    """The share of the time with work in which our device waited for the host, 0 to 1."""

    @property
    def rate(self) -> float:
        """Output tokens per second of the whole round, prefills included."""
        return self.output_tokens / self.wall_s


class LoadSeries(Fact):
    """All rounds of one side. `form`: the one of its forms that was fastest, by warm-up round."""

    side: str
    form: str = ""
    rounds: list[LoadRound]


class ServeCase(Fact):
    """A load on one or more sides: `concurrency` streams, each a request after another."""

    cores: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int
    series: list[LoadSeries]
    module: list[StepCase]
    """Our module alone in the same rounds: the decode of as many rows, and prefills."""

    @property
    def ours(self) -> LoadSeries:
        return next(s for s in self.series if s.side == OURS)

    def module_rounds(self, phase: str) -> tuple[StepCase, list[Round]]:
        """The module's decode, or its cheapest prefill per prompt, and its rounds."""
        cases = [case for case in self.module if case.phase == phase]
        best = min(cases, key=lambda case: case.side(OURS).seconds / case.batch)
        return best, best.side(OURS).rounds


class Timing(Fact):
    """Something done a few times as a whole: a build, a start."""

    name: str
    cores: int
    values: dict[str, list[float]]
    """By quantity, its unit in its name; a value per repetition."""


class Result(Fact):
    """One run of scripts/bench."""

    schema_version: Literal[1] = 1
    benchmark: Benchmark
    command: str
    started: str
    commit: str
    model: str
    dtype: str
    machine: Machine
    versions: dict[str, str]
    bandwidth: list[Bandwidth] = []
    steps: list[StepCase] = []
    serve: list[ServeCase] = []
    timings: list[Timing] = []

    def bandwidth_of(self, cores: int) -> float | None:
        """GB/s, None where it was not measured."""
        return next((b.best for b in self.bandwidth if b.cores == cores), None)


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Round by round: both sides of a pair saw the same moment of the machine."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def write(result: Result, path: Path) -> None:
    """One line per list of numbers, so that files stay small and readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_compact(result.model_dump(mode="json")) + "\n")


def read(path: Path) -> Result:
    """Raises UsageError for what is not a result of this version."""
    try:
        return Result.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the top level"
        raise UsageError(
            f"{path} is not a benchmark's result: {where}: {first['msg']}; measure again"
        ) from error


def _compact(value: object, indent: str = "") -> str:
    deeper = indent + " "
    if isinstance(value, dict) and value:
        items = [f"{deeper}{json.dumps(k)}: {_compact(v, deeper)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = [deeper + _compact(item, deeper) for item in value]
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)
