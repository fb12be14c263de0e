"""decode, prefill and context: one step of the loaded model, this project and its peers in turn.

The peers are llama.cpp, and OpenVINO if asked for; or another commit of this project alone. All
sides, and the memory bandwidth, live in processes of their own on the same cores. A round is
ours, theirs, the memory; rounds follow each other, so that all sides see the same weather.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine, peers
from benchmarks.results import OPENVINO, OURS, PEER, Bandwidth, Round, Series, StepCase
from benchmarks.revisions import Revision
from benchmarks.sides import openvino
from benchmarks.worker import SCRIPTS, Worker
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.artifacts.irpa import DTYPE_BYTES, ArchiveReader
from shark_llm.artifacts.manifest import CacheSpec, Manifest
from shark_llm.errors import UsageError
from shark_llm.runtime.runner import Phase

WARMUP = 2
"""Steps of a round that are not counted."""
KV_DTYPES = {"bf16": "f16", "f16": "f16", "f32": "f32", "int8": "f16"}
"""llama.cpp's KV cache beside our own: of equal width; f16 is its default."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A kind of step: `batch` rows, each behind (decode) or of (prefill) `context` tokens."""

    phase: Phase
    batch: int
    context: int


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all cases of a run share."""

    bundle: Path
    dtype: str
    device: str
    rounds: int
    steps: int
    """Counted steps of a round."""
    openvino: bool = False
    """Whether OpenVINO GenAI takes part."""
    against: Revision | None = None
    """The only peer, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    cases: list[StepCase]
    bandwidth: list[Bandwidth]
    versions: dict[str, str]


def measure(setup: Setup, shapes: Sequence[Shape], cores: Sequence[int]) -> Measured:
    """All `shapes` on each number of cores. Raises UsageError for what the bundle cannot run."""
    manifest = open_bundle(setup.bundle).manifest
    check(manifest, setup, shapes)
    pinned = {count: machine.choose_cpus(count) for count in cores}
    library = peers.triad_library()
    weights = weight_bytes(setup.bundle, manifest)
    cases: list[StepCase] = []
    bandwidth: list[Bandwidth] = []
    versions: dict[str, str] = {}
    for count, cpus in pinned.items():
        with ExitStack() as stack:
            tokens = kv_cache_tokens(setup, manifest, shapes)
            sides = {OURS: open_shark(stack, setup.device, setup.bundle, tokens, cpus)}
            if setup.against is not None:
                sides[setup.against.side] = open_shark(
                    stack,
                    setup.device,
                    setup.against.bundle(setup.dtype),
                    tokens,
                    cpus,
                    paths=setup.against.paths,
                )
            else:
                found, said = open_peers(stack, setup, tokens, cpus)
                sides |= found
                versions |= said
            memory = stack.enter_context(open_memory(library, cpus))
            speeds: list[dict[str, float]] = []
            for shape in shapes:
                series = run_case(setup, shape, sides, memory, speeds)
                bytes_read = weights + shape.batch * kv_bytes(manifest, shape, setup.steps)
                case = StepCase(
                    cores=count,
                    phase=shape.phase,
                    batch=shape.batch,
                    context=shape.context,
                    bytes_read=bytes_read,
                    series=series,
                )
                cases.append(case)
                ratios = ", ".join(
                    f"{statistics.median(case.ratios(peer)):.2f} x {peer}" for peer in case.peers
                )
                print(
                    f"bench: {count} cores, {shape.phase} of {shape.batch} x {shape.context}: "
                    f"{ratios}",
                    flush=True,
                )
            bandwidth.append(to_bandwidth(count, speeds))
            for name, side in sides.items():
                if name != OPENVINO:  # which closes as its context ends
                    side.call("close")
    return Measured(cases=cases, bandwidth=bandwidth, versions=versions)


def run_case(
    setup: Setup,
    shape: Shape,
    sides: dict[str, Worker],
    memory: Worker,
    speeds: list[dict[str, float]],
) -> list[Series]:
    """Prepare all sides, then let them run in turn; what the memory did is added to `speeds`."""
    arguments = {
        "phase": shape.phase,
        "batch": shape.batch,
        "context": shape.context,
        "steps": WARMUP + setup.steps,
    }
    details = {name: side.call("prepare", **arguments) for name, side in sides.items()}
    rounds: dict[str, list[Round]] = {name: [] for name in sides}
    for _ in range(setup.rounds):
        for name, side in sides.items():
            sample = side.call("round", steps=setup.steps, warmup=WARMUP)
            rounds[name].append(Round.model_validate(sample))
        speeds.append(memory.call("round"))
    return [Series(side=name, detail=details[name], rounds=rounds[name]) for name in sides]


def open_shark(
    stack: ExitStack,
    device: str,
    bundle: Path,
    kv_cache_tokens: int,
    cpus: Sequence[int],
    *,
    paths: Sequence[Path] = (SCRIPTS,),
) -> Worker:
    """A bundle loaded by the code of `paths`, or else by our own."""
    python = Path(sys.executable)
    worker = stack.enter_context(Worker("shark_worker", python=python, cpus=cpus, paths=paths))
    worker.call("open", bundle=str(bundle), device=device, kv_cache_tokens=kv_cache_tokens)
    return worker


def open_peers(
    stack: ExitStack, setup: Setup, kv_cache_tokens: int, cpus: Sequence[int]
) -> tuple[dict[str, Worker], dict[str, str]]:
    """The peers that take part, loaded, and their versions."""
    python, gguf = peers.llama_cpp(), peers.gguf(setup.dtype)
    llama = stack.enter_context(Worker("llama_worker", python=python, cpus=cpus))
    kv_dtype = KV_DTYPES[setup.dtype]
    opened = llama.call("open", model=str(gguf), threads=len(cpus), kv_dtype=kv_dtype)
    sides = {PEER: llama}
    versions = {
        "llama-cpp-python": opened["version"],
        "llama.cpp built with": opened["build"],
    }
    if setup.openvino:
        tokens = kv_cache_tokens
        sides[OPENVINO], said = stack.enter_context(
            openvino(setup.dtype, cpus, kv_cache_tokens=tokens, step_tokens=tokens)
        )
        where = f"{len(cpus)} {'core' if len(cpus) == 1 else 'cores'}"
        versions[f"{OPENVINO}, {where}"] = f"{said['version']}, {said['form']}"
    return sides, versions


def kv_cache_tokens(setup: Setup, manifest: Manifest, shapes: Sequence[Shape]) -> int:
    """Enough for the largest of `shapes`."""
    page = manifest.page_size
    per_row = [-(-(s.context + WARMUP + setup.steps) // page) * page for s in shapes]
    return max(shape.batch * tokens for shape, tokens in zip(shapes, per_row, strict=True))


def open_memory(library: Path, cpus: Sequence[int]) -> Worker:
    worker = Worker("stream_worker", python=Path(sys.executable), cpus=cpus)
    worker.call("open", library=str(library))
    return worker


def to_bandwidth(cores: int, speeds: Sequence[dict[str, float]]) -> Bandwidth:
    return Bandwidth(
        cores=cores, triad=[s["triad"] for s in speeds], read=[s["read"] for s in speeds]
    )


def check(manifest: Manifest, setup: Setup, shapes: Sequence[Shape]) -> None:
    """Raises UsageError for a shape beyond the bundle, or another precision."""
    peers.check_dtype(manifest, setup.dtype)
    for shape in shapes:
        compiled = sorted(e.batch_size for e in manifest.entry_points if e.phase == shape.phase)
        if shape.batch not in compiled:
            raise UsageError(
                f"the bundle has no {shape.phase} of batch {shape.batch}, only of "
                f"{' '.join(map(str, compiled))}: choose one of them, or compile another bundle"
            )
        longest = shape.context + (WARMUP + setup.steps if shape.phase == "decode" else 0)
        if longest > manifest.max_model_len:
            raise UsageError(
                f"a context of {shape.context} with {WARMUP + setup.steps} steps is {longest} "
                f"tokens, the bundle allows {manifest.max_model_len}: choose less"
            )


def weight_bytes(bundle: Path, manifest: Manifest) -> int:
    """What a step reads of the parameters: all, but of an untied embedding table only rows."""
    entries = [
        e for name in manifest.archives for e in ArchiveReader(bundle / name).entries.values()
    ]
    tied = bool(manifest.config["tie_word_embeddings"])
    return sum(e.nbytes for e in entries if tied or not e.name.startswith("token_embd."))


def kv_bytes(manifest: Manifest, shape: Shape, steps: int) -> int:
    """What a step reads of one row's KV cache: a decode the mean context, a prefill nothing."""
    if shape.phase == "prefill":
        return 0
    mean = shape.context + WARMUP + (steps + 1) / 2
    return round(mean * sum(map(bytes_per_page, manifest.caches)) / manifest.page_size)


def bytes_per_page(spec: CacheSpec) -> int:
    """Of one page in one cache; dimension 0 counts the pages."""
    elements = 1
    for dim in spec.shape[1:]:
        assert isinstance(dim, int), "only the number of pages is dynamic"
        elements *= dim
    return elements * DTYPE_BYTES[spec.dtype]
