"""manifest.json: the contract between shark-compile and shark-serve, version 1.

Unknown fields are refused (a newer writer bumps `schema_version`). Shapes hold ints, and names of
dynamic dimensions as strings.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"

Dim = int | str


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


class EntryPoint(Frozen):
    """A public function of the module.

    It takes `inputs`, then every cache of `Manifest.caches` in order (consumed); it returns `results`,
    then every cache in the same order, each aliasing the argument.
    """

    name: str
    phase: Literal["prefill", "decode"]
    batch_size: int
    inputs: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]


class Replicate(Frozen):
    """The parameter is whole on every rank and stored once, in the shared archive."""

    kind: Literal["replicate"] = "replicate"


class Split(Frozen):
    """Rank r owns rows ranges[r][0] .. ranges[r][1] - 1 along `dim`. Ranges may overlap (KV replication)."""

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
    """What the module was compiled for. `flags` are all flags of iree-compile but input and output."""

    name: str
    driver: str
    flags: tuple[str, ...]
    cpu: str | None = None
    cpu_features: tuple[str, ...] = ()


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

    schema_version: Literal[1] = 1
    source: Source
    config: dict[str, Any]
    """The ModelConfig that was compiled, field by field."""
    weights: Literal["checkpoint", "dummy"] = "checkpoint"
    dtype: str
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
    caches: tuple[CacheSpec, ...]
    parameter_scope: str = "model"
    module: str = "model.vmfb"
    archives: tuple[str, ...]
    """model.irpa, then model.rank{r}.irpa."""
    target: Target
    versions: dict[str, str]
    """shark-llm, iree-base-compiler, iree-base-runtime (wanted), torch, python."""
    golden: GoldenReport | None
    """None: the target cannot run where the bundle was built."""
    files: dict[str, FileInfo]
    """Every other file of the bundle."""
