"""Will it fit? Bytes per rank, KV tokens that remain and the least tp, from config.json alone.

    device's memory = reserve + weights + workspace + KV tokens * KV bytes per token

weights     exactly what the rank's archives hold
KV          2 (K and V) * layers * kv heads of the rank * head_dim * bytes of the KV dtype
workspace   what a step holds at the greatest length: what a compiled module allocates if the caller
            has one, else estimated
reserve     driver, code objects and fragmentation

A GPU holds one rank; a CPU's ranks share one memory, and the sums of all of them must fit in it.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from shark_llm.artifacts.irpa import DTYPE_BYTES
from shark_llm.artifacts.manifest import WeightsDtype
from shark_llm.compile.targets import CompileTarget
from shark_llm.compile.workspace_estimate import ModuleShape, estimate_workspace
from shark_llm.errors import CapacityError, UsageError
from shark_llm.model.config import ModelConfig
from shark_llm.sharding.archives import WEIGHT_DTYPES, archive_sizes
from shark_llm.sharding.plan import (
    RankShape,
    local_parameters,
    plan_parameters,
    plan_ranks,
    supported_tps,
)

GIB = 1 << 30

GPUS = MappingProxyType(
    {
        "mi250x": 64 * GIB,  # of one GCD, which is one device
        "mi300a": 128 * GIB,
        "mi300x": 192 * GIB,
        "mi325x": 256 * GIB,
        "mi355x": 288 * GIB,
    }
)
"""Memory of one device in bytes, by the product's name."""

GPU_TARGETS = MappingProxyType(
    {
        "mi250x": "gfx90a",
        "mi300a": "gfx942",
        "mi300x": "gfx942",
        "mi325x": "gfx942",
        "mi355x": "gfx950",
    }
)
"""The compile target of each of GPUS."""

RESERVE_BYTES = 2 * GIB
MODULE_ALLOWANCE = 64 << 20
"""Disk to keep free for model.vmfb and small files; the largest known module has 6 MB a phase."""

KV_DTYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What a rank's device has to offer."""

    name: str
    num_bytes: int
    is_shared: bool = False
    """By all ranks, as on a CPU; else each rank has a device of its own."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one rank needs and has left, in bytes."""

    rank: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    """Tokens of KV cache that fit beside the rest; 0 when not even the rest fits."""


@dataclass(frozen=True, kw_only=True)
class TpMemory:
    """One way to split the model."""

    tp: int
    ranks: tuple[RankMemory, ...]
    kv_tokens_needed: int
    longest_len: int
    """The greatest length of which `max_num_seqs` sequences fit; 0: none."""
    workspace_is_estimate: bool = True

    @property
    def kv_tokens(self) -> int:
        """KV tokens of the whole: every rank holds its heads of every token."""
        return min(rank.kv_tokens for rank in self.ranks)

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.kv_tokens_needed


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The answers for several tp, ascending."""

    memory_bytes: int
    """Of each device; of all ranks together where they share one."""
    splits: tuple[TpMemory, ...]
    max_num_seqs: int = 1
    """Sequences that must have room at once, all of the greatest length."""

    @property
    def lower_bound(self) -> int | None:
        """The least tp that fits; None: none of them does."""
        return next((split.tp for split in self.splits if split.fits), None)


def device_memory(target: CompileTarget, gpu: str | None = None) -> DeviceMemory:
    """The memory that a plan for `target` counts with.

    `gpu`, one of GPUS, names the product where the target is that of several; None: the target's
    usual one, and for a CPU this machine, whose memory all ranks share. Raises UsageError for a GPU
    that is unknown or of another target.
    """
    if gpu is not None:
        if gpu not in GPUS:
            raise UsageError(f"no such GPU: {gpu!r}; choose from {', '.join(GPUS)}")
        if GPU_TARGETS[gpu] != target.name:
            raise UsageError(
                f"--gpu {gpu} is a {GPU_TARGETS[gpu]}, and the compile target is {target.name}: "
                f"give --compile-target {GPU_TARGETS[gpu]}, or another GPU"
            )
        return DeviceMemory(name=gpu, num_bytes=GPUS[gpu])
    if target.memory_bytes is None:
        num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(name="this machine", num_bytes=num_bytes, is_shared=True)
    usual = (
        name
        for name, size in GPUS.items()
        if (GPU_TARGETS[name], size) == (target.name, target.memory_bytes)
    )
    return DeviceMemory(name=next(usual, target.name), num_bytes=target.memory_bytes)


def choose_max_model_len(asked: int | None, config: ModelConfig) -> int:
    """`asked`, or all positions the model was made for (None). UsageError for more than those."""
    limit = config.max_position_embeddings
    if config.sliding_window is not None:
        limit = min(limit, config.sliding_window)
    if asked is not None and not 1 <= asked <= limit:
        raise UsageError(f"--max-model-len is {asked}: this model takes 1 to {limit}")
    return asked or limit


def plan_memory(
    config: ModelConfig,
    *,
    memory_bytes: int,
    is_shared: bool = False,
    dtype: str,
    weights_dtype: WeightsDtype | None = None,
    kv_dtype: str,
    tps: Iterable[int] | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 1,
    module: ModuleShape | None = None,
    workspace: Mapping[int, Sequence[int]] | None = None,
    reserve_bytes: int = RESERVE_BYTES,
) -> MemoryPlan:
    """Plan `config` on devices of `memory_bytes` each, for every tp of `tps` (None: all that work).

    With `is_shared` all ranks share that memory, as simulated devices of one CPU do.

    It fits when `max_num_seqs` sequences of `max_model_len` tokens (None: all positions of the
    model) have room beside the workspace of steps at that length. That is estimated for `module`
    (None: the default one, for a GPU), or is `workspace`, the bytes of each rank by tp, at those
    tp. Raises ShardingError for a tp that cannot be, UsageError for an unknown dtype.
    """
    for name, value, known in (
        ("weight dtype", dtype, WEIGHT_DTYPES),
        ("KV dtype", kv_dtype, KV_DTYPES),
    ):
        if value not in known:
            raise UsageError(f"no such {name}: {value!r}; choose from {', '.join(known)}")
    length = max_model_len or config.max_position_embeddings
    splits = []
    for tp in sorted(supported_tps(config) if tps is None else tps):
        plan = plan_parameters(config, tp, quantized=weights_dtype is not None)
        needs = _Needs(
            config=config,
            shapes=plan_ranks(config, tp),
            weight_bytes=tuple(
                sum(
                    math.prod(p.shape) * DTYPE_BYTES[p.dtype]
                    for p in local_parameters(config, plan, rank, dtype).values()
                )
                for rank in range(tp)
            ),
            dtype=dtype,
            kv_dtype=kv_dtype,
            module=module or ModuleShape(),
            measured=(workspace or {}).get(tp),
            memory_bytes=memory_bytes - reserve_bytes,
            is_shared=is_shared,
        )
        splits.append(
            TpMemory(
                tp=tp,
                ranks=needs.ranks(length),
                kv_tokens_needed=length * max_num_seqs,
                longest_len=needs.longest_len(max_num_seqs),
                workspace_is_estimate=needs.measured is None,
            )
        )
    return MemoryPlan(memory_bytes=memory_bytes, splits=tuple(splits), max_num_seqs=max_num_seqs)


@dataclass(frozen=True, kw_only=True)
class _Needs:
    """What the ranks of one tp need, whatever the length."""

    config: ModelConfig
    shapes: tuple[RankShape, ...]
    weight_bytes: tuple[int, ...]
    dtype: str
    kv_dtype: str
    module: ModuleShape
    measured: Sequence[int] | None
    memory_bytes: int
    """Of each device, or of all ranks, beside the reserve."""
    is_shared: bool

    def ranks(self, length: int) -> tuple[RankMemory, ...]:
        """With the workspace of steps whose sequences have up to `length` tokens."""
        needs = [
            RankMemory(
                rank=shape.rank,
                weight_bytes=self.weight_bytes[shape.rank],
                workspace_bytes=self._workspace(shape, length),
                kv_bytes_per_token=kv_bytes_per_token(self.config, shape, self.kv_dtype),
                kv_tokens=0,
            )
            for shape in self.shapes
        ]
        devices = [needs] if self.is_shared else [[rank] for rank in needs]
        return tuple(
            replace(rank, kv_tokens=tokens)
            for device in devices
            for tokens in [_kv_tokens(device, self.memory_bytes)]
            for rank in device
        )

    def longest_len(self, num_seqs: int) -> int:
        """The greatest length of which `num_seqs` sequences have room; 0: none."""

        def is_too_long(length: int) -> bool:
            return min(rank.kv_tokens for rank in self.ranks(length)) < length * num_seqs

        lengths = range(1, choose_max_model_len(None, self.config) + 1)
        return bisect.bisect_left(lengths, True, key=is_too_long)

    def _workspace(self, shape: RankShape, length: int) -> int:
        if self.measured is not None:
            return self.measured[shape.rank]
        return estimate_workspace(
            self.config,
            shape,
            tp=len(self.shapes),
            dtype=self.dtype,
            context_tokens=length,
            module=self.module,
        )


def _kv_tokens(ranks: list[RankMemory], memory_bytes: int) -> int:
    """Tokens for which all of `ranks`, which share this memory, have room."""
    left = memory_bytes - sum(rank.weight_bytes + rank.workspace_bytes for rank in ranks)
    return max(0, left) // sum(rank.kv_bytes_per_token for rank in ranks)


def kv_bytes_per_token(config: ModelConfig, shape: RankShape, kv_dtype: str) -> int:
    """Bytes of KV cache that one token takes on the rank."""
    per_layer = shape.num_kv_heads * config.head_dim * DTYPE_BYTES[kv_dtype]
    return 2 * config.num_layers * per_layer


def check_fits(split: TpMemory, plan: MemoryPlan, *, device: str) -> None:
    """Raise CapacityError unless `split` fits; it says what is missing, and what would fit."""
    if split.fits:
        return
    tightest = min(split.ranks, key=lambda rank: rank.kv_tokens)
    bound = plan.lower_bound
    remedies = [] if bound is None else [f"the least tp that fits is {bound}"]
    if split.longest_len:
        remedies.append(f"tp {split.tp} fits with --max-model-len {split.longest_len}")
    elif bound is None:
        remedies.append(
            "no tp fits: lower --max-model-len or --max-num-seqs, or use devices with more memory"
        )
    raise CapacityError(
        f"tp {split.tp} does not fit {device} with {plan.memory_bytes / GIB:.0f} GiB: rank "
        f"{tightest.rank} has {tightest.weight_bytes / GIB:.1f} GiB of weights, "
        f"{tightest.workspace_bytes / GIB:.1f} GiB of workspace and room for "
        f"{tightest.kv_tokens} KV tokens, {split.kv_tokens_needed} are needed; "
        f"{'; '.join(remedies)}"
    )


def check_capacity(
    config: ModelConfig,
    device: DeviceMemory,
    *,
    tp: int,
    dtype: str,
    weights_dtype: WeightsDtype | None = None,
    max_model_len: int,
    module: ModuleShape | None = None,
) -> None:
    """Raise CapacityError unless one sequence of `max_model_len` tokens has room at `tp`.

    The KV cache is of `dtype`, and so are the weights unless `weights_dtype` says otherwise.
    The workspace is that of `module`.
    """
    ask = partial(
        plan_memory,
        config,
        memory_bytes=device.num_bytes,
        is_shared=device.is_shared,
        dtype=dtype,
        weights_dtype=weights_dtype,
        kv_dtype=dtype,
        max_model_len=max_model_len,
        module=module,
    )
    (split,) = ask(tps=[tp]).splits
    if not split.fits:  # only then it matters what else would
        check_fits(split, ask(), device=device.name)


def required_bytes(
    config: ModelConfig,
    *,
    tp: int,
    dtype: str,
    weights_dtype: WeightsDtype | None = None,
    dummy: bool = False,
) -> dict[str, int]:
    """Bytes of every parameter archive by file name, exact to the byte; for --dry-run and the disk.

    The module's size is known only after compiling: keep MODULE_ALLOWANCE free beside these.
    """
    plan = plan_parameters(config, tp, quantized=weights_dtype is not None)
    return archive_sizes(config, plan, tp=tp, dtype=dtype, dummy=dummy)
