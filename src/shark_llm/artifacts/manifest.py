"""manifest.json: the contract between shark-compile and shark-serve, version 2.

Unknown fields are refused (a newer writer bumps `schema_version`). Shapes hold ints, and names of
dynamic dimensions as strings.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shark_llm.errors import ArtifactError, VersionMismatchError

SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
SUM_BLOCK = 256
"""Tokens of a vocabulary whose weights `Manifest.softmax_sums` add up."""

Dim = int | str

WeightsDtype = Literal["int8"]
"""What matrices are quantized to."""
WEIGHTS_DTYPES: tuple[WeightsDtype, ...] = ("int8",)

ByteProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_BLOCK_BYTES = 1 << 20


class Frozen(BaseModel):
    """Base of all parts: immutable and strict about unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSpec(Frozen):
    """A tensor of a signature. `dtype` is one of i32, i64, f32, f16, bf16."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


class CacheSpec(TensorSpec):
    """A KV cache tensor: dimension 0 is the number of pages, the rest one page of one layer."""

    rank: int


class Function(Frozen):
    """A public function of the module, compiled for one batch size."""

    name: str
    batch_size: int
    inputs: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]


class EntryPoint(Function):
    """One that runs the model.

    It takes `inputs`, then every cache of `Manifest.caches` in order (consumed); it returns
    `results`, then every cache in the same order, each aliasing the argument.
    """

    phase: Literal["prefill", "decode"]


class Replicate(Frozen):
    """The parameter is whole on every rank and stored once, in the shared archive."""

    kind: Literal["replicate"] = "replicate"


class Split(Frozen):
    """Rank r owns rows ranges[r][0] .. ranges[r][1] - 1 along `dim`.

    Ranges may overlap (KV replication). A rank with an empty range has no such parameter.
    """

    kind: Literal["split"] = "split"
    dim: int
    ranges: tuple[tuple[int, int], ...]


Placement = Annotated[Replicate | Split, Field(discriminator="kind")]


class Source(Frozen):
    """Where the checkpoint came from. `digest` is the checkpoint's content digest."""

    name: str
    revision: str | None
    digest: str


class Target(Frozen):
    """What the module was compiled for. `flags`: all of iree-compile's but input and output."""

    name: str
    driver: str
    flags: tuple[str, ...]
    cpu: str | None = None
    cpu_features: tuple[str, ...] = ()
    """Instruction sets that the serving CPU must have, by their Linux names."""
    memory_bytes: int | None = None
    """Of one device; None: the memory of the machine that serves."""


class FileInfo(Frozen):
    size: int
    sha256: str


class GoldenReport(Frozen):
    """The golden check that this bundle passed before it was published."""

    max_abs_error: float
    tolerance: float
    prompt_tokens: int
    decode_steps: int


class Manifest(Frozen):
    """Everything that serve needs to know, and everything a bug report should say."""

    schema_version: Literal[2] = 2
    source: Source
    config: dict[str, Any]
    """The ModelConfig that was compiled, field by field."""
    weights: Literal["checkpoint", "dummy"] = "checkpoint"
    dtype: str
    weights_dtype: WeightsDtype | None = None
    """Of matrices, which then have scales; None: as `dtype`."""
    kv_dtype: str
    tp: int
    plan: dict[str, Placement]
    page_size: int
    max_model_len: int
    """Most positions of a sequence; never more than the model was made for."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    entry_points: tuple[EntryPoint, ...]
    softmax_sums: tuple[Function, ...]
    """What sampling asks of the logits that entry points leave on rank 0's device, for each of
    their batch sizes: of every `SUM_BLOCK` tokens the sum of exp((logit - best) / temperature)."""
    caches: tuple[CacheSpec, ...]
    parameter_scope: str = "model"
    module: str = "model.vmfb"
    module_key: str
    """sha256 of all that the module depends on: its MLIR source, the flags, the compiler."""
    archives: tuple[str, ...]
    """model.irpa, then model.rank{r}.irpa."""
    target: Target
    versions: dict[str, str]
    """shark-llm, iree-base-compiler, iree-base-runtime (wanted), torch, python."""
    golden: GoldenReport | None
    """None: the target cannot run where the bundle was built."""
    files: dict[str, FileInfo]
    """Every other file of the bundle."""

    @property
    def precision(self) -> str:
        """As `precision` says it."""
        return precision(self.dtype, self.weights_dtype)


def precision(dtype: str, weights_dtype: str | None) -> str:
    """For people: `bf16`, or `bf16 with int8 weights`."""
    return dtype if weights_dtype is None else f"{dtype} with {weights_dtype} weights"


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical JSON: sorted keys, two spaces, UTF-8. Equal manifests give equal bytes."""
    fields = manifest.model_dump(mode="json")
    text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def read_manifest(path: Path) -> Manifest:
    """Parse and check manifest.json.

    Raises VersionMismatchError for another schema version, ArtifactError when the file is missing
    or says something else than it must.
    """
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise ArtifactError(
            f"no bundle at {path.parent}: cannot read {path.name} ({error.strerror}); "
            "check the path, or build it with shark-compile"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{path} is not JSON ({error}): copy the bundle again or rebuild it"
        ) from error
    version = fields.get("schema_version") if isinstance(fields, dict) else None
    if isinstance(version, int) and version != SCHEMA_VERSION:
        remedy = "rebuild the bundle" if version < SCHEMA_VERSION else "install a newer shark-llm"
        raise VersionMismatchError(
            f"{path} has schema version {version}, this shark-llm reads {SCHEMA_VERSION}: {remedy}"
        )
    try:
        return Manifest.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        first, count = error.errors()[0], error.error_count()
        where = ".".join(str(part) for part in first["loc"]) or "the top level"
        more = f" and {count - 1} more faults" if count > 1 else ""
        raise ArtifactError(
            f"{path} is not a manifest: {where}: {first['msg']}{more}; rebuild the bundle"
        ) from error


def digest_files(
    root: Path, names: Iterable[str], progress: ByteProgress | None = None
) -> dict[str, FileInfo]:
    """Size and sha256 of each of the files `names` below `root`, several at a time.

    Hashing releases the GIL, so threads give the speed of the disk or of all cores. `progress` is
    called in the caller's thread, about ten times a second. Raises OSError.
    """
    ordered = sorted(names)
    total = sum((root / name).stat().st_size for name in ordered)
    done = dict.fromkeys(ordered, 0)

    def digest(name: str) -> FileInfo:
        sha256, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
        with (root / name).open("rb", buffering=0) as file:
            while count := file.readinto(block):
                sha256.update(block[:count])
                done[name] += count
        return FileInfo(size=done[name], sha256=sha256.hexdigest())

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        futures = {name: pool.submit(digest, name) for name in ordered}
        pending: set[Future[FileInfo]] = set(futures.values())
        while pending:
            _, pending = wait(pending, timeout=0.1)
            if progress is not None:
                progress(min(sum(done.values()), total), total)
    return {name: future.result() for name, future in futures.items()}
