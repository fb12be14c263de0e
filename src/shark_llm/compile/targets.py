"""Compile targets as data: one row each, from a name to flags, forms and limits.

CPU targets differ by instruction set, GPU targets by chip. `host` is the row of this machine's CPU.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from shark_llm.artifacts.cpu import host_cpu_features
from shark_llm.errors import UnsupportedTargetError
from shark_llm.export.packed import LinearForm
from shark_llm.export.prefill_walk import STACK_BYTES
from shark_llm.export.signatures import ExportSettings
from shark_llm.model.llama import AttentionForm

Driver = Literal["local-task", "hip", "cuda"]
BF16_CPU_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})
"""Kernel names of what multiplies bf16 operands natively."""


@dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """What to tell the exporter and the compiler about a kind of device."""

    name: str
    description: str
    driver: Driver
    """What runs the module: a driver of iree-base-runtime."""
    backend: str
    """The compiler's backend, as in --iree-hal-target-backends."""
    flags: tuple[str, ...]
    """Flags of iree-compile beyond device and backend."""
    attention_form: AttentionForm
    linear_form: LinearForm
    default_dtype: str = "bf16"
    batch_sizes_decode: tuple[int, ...] = ExportSettings.batch_sizes_decode
    """By default. On GPUs each more costs minutes of compiling a large model, and workspace."""
    memory_bytes: int | None = None
    """Of one device of the common model of this chip; None: the machine's own memory."""
    cpu: str | None = None
    cpu_features: tuple[str, ...] = ()
    """Kernel names of the instruction sets that a machine must have to run the module."""

    def device_flags(self, tp: int) -> tuple[str, ...]:
        """The flags that declare `tp` devices of this target, rank r being @__device_r."""
        kind = "local" if self.driver == "local-task" else self.driver
        devices = tuple(f"--iree-hal-target-device={kind}[{rank}]" for rank in range(tp))
        if kind == "local":
            devices += (f"--iree-hal-local-target-device-backends={self.backend}",)
        return devices

    def compile_flags(self, tp: int) -> tuple[str, ...]:
        """All flags of iree-compile but input, output and what the user adds."""
        return (*self.device_flags(tp), *self.flags)


PACKED = LinearForm(form="packed")
PACKED_512 = LinearForm(form="packed", tile_n=32, max_tile_m=8, prefill_tile_m=8)
PLAIN = LinearForm(form="plain")
PLAIN_SHARED = LinearForm(form="plain", shares_layers=True)

_STACK = f"--iree-llvmcpu-stack-allocation-limit={STACK_BYTES}"
# The generic micro-kernel for mixed operands is scalar code; generated code is vectorized.
_CPU = ("--iree-llvmcpu-enable-ukernels=none", _STACK)
# Where it would load the operands of small products directly into shared memory, the compiler
# divides by zero (SIGFPE in getXorShuffleParamsForTunedChipset): 1 row of 64 columns, 8 of 144.
_INDIRECT = ("--iree-llvmgpu-use-direct-load=false",)
_V3 = ("avx2", "fma", "f16c", "bmi2")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512dq", "avx512vl")


def _packed(features: tuple[str, ...]) -> LinearForm:
    if "avx512f" in features:
        return PACKED_512
    return replace(PACKED, by_rows={"avx2", "fma"} <= set(features))


def _cpu(name: str, description: str, cpu: str, features: tuple[str, ...]) -> CompileTarget:
    return CompileTarget(
        name=name,
        description=description,
        driver="local-task",
        backend="llvm-cpu",
        flags=(f"--iree-llvmcpu-target-cpu={cpu}", *_CPU),
        attention_form="matmul",
        batch_sizes_decode=(*ExportSettings.batch_sizes_decode, 16),
        linear_form=_packed(features),
        cpu=cpu,
        cpu_features=features,
    )


def _hip(name: str, description: str, gib: int, *flags: str) -> CompileTarget:
    return CompileTarget(
        name=name,
        description=description,
        driver="hip",
        backend="rocm",
        flags=(f"--iree-rocm-target={name}", *flags),
        attention_form="fused",
        linear_form=PLAIN_SHARED,
        memory_bytes=gib << 30,
    )


def _cuda(name: str, description: str, gib: int) -> CompileTarget:
    return CompileTarget(
        name=name,
        description=description,
        driver="cuda",
        backend="cuda",
        flags=(f"--iree-cuda-target={name}",),
        attention_form="fused",
        linear_form=PLAIN_SHARED,
        memory_bytes=gib << 30,
    )


_ROWS = (
    _cpu("x86-64-v3", "x86 CPUs with AVX2 (Haswell, Zen and later)", "x86-64-v3", _V3),
    _cpu("x86-64-v4", "x86 CPUs with AVX-512 (Skylake-X, Zen 4 and later)", "x86-64-v4", _V4),
    _hip("gfx942", "AMD Instinct MI300X, MI300A, MI325X", 192),
    _hip("gfx950", "AMD Instinct MI350X, MI355X", 288, *_INDIRECT),
    _hip("gfx90a", "AMD Instinct MI210, MI250X (one die)", 64),
    _hip("gfx1100", "AMD Radeon RX 7900, PRO W7900", 24),
    _cuda("sm_80", "NVIDIA A100 and later (PTX)", 80),
    _cuda("sm_89", "NVIDIA L40, RTX 4090 and later (PTX)", 24),
)
TARGETS = {row.name: row for row in _ROWS}
HOST = "host"


def target_names() -> tuple[str, ...]:
    """All names that `get_target` takes."""
    return (HOST, *TARGETS)


def get_target(name: str, *, quantized: bool = False) -> CompileTarget:
    """The row of `name`; `host` is made for the CPU that this runs on, and for quantized weights
    or others."""
    if name == HOST:
        return host_target(quantized=quantized)
    if name not in TARGETS:
        raise UnsupportedTargetError(
            f"no compile target {name!r}: choose from {', '.join(target_names())}"
        )
    return TARGETS[name]


def linear_form(name: str, cpu_features: Collection[str], *, quantized: bool) -> LinearForm:
    """How products of a module for the target `name` were written; of `host`, the features are
    those of the machine that built it."""
    if name != HOST:
        return get_target(name).linear_form
    if compiler_tiles(cpu_features, quantized=quantized):
        return PLAIN
    return _packed(tuple(cpu_features))


def compiler_tiles(cpu_features: Collection[str], *, quantized: bool) -> bool:
    """Whether products for a `host` of these features are left to the compiler's own tiling.

    It reaches the chip's speed with bf16 instructions, which quantized weights have no use for.
    """
    return bool(BF16_CPU_FEATURES & set(cpu_features)) and not quantized


def host_target(*, quantized: bool = False) -> CompileTarget:
    """This machine's CPU: all it has is used, so the module may not run elsewhere."""
    features = host_cpu_features()
    base = _cpu(HOST, "the CPU that this runs on", "host", tuple(sorted(features)))
    if compiler_tiles(features, quantized=quantized):
        return replace(
            base,
            flags=("--iree-llvmcpu-target-cpu=host", "--iree-global-opt-data-tiling", _STACK),
            linear_form=PLAIN,
        )
    return base
