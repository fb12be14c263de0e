"""What a build will do, known before a weight is fetched; what can be refused is refused here.

settings  -> check_settings    batch sizes, page size, target, directories
+ name    -> resolve           local files, or the hub's small files and its list of weights
+ config  -> make_plan         architecture, dtype, tensor parallel plan, sizes of the archives
+ digest  -> expected_manifest what the bundle must say, to compare older bundles with
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from shark_llm import __version__
from shark_llm.artifacts.irpa import archive_name, archive_ranks
from shark_llm.artifacts.manifest import Manifest, Placement, Source, Target, WeightsDtype
from shark_llm.artifacts.stage_cache import CachePolicy, Note, StageCache, cache_root
from shark_llm.checkpoint.aux_files import eos_token_ids, read_aux_files
from shark_llm.checkpoint.config_only import ConfigOnlyCheckpoint
from shark_llm.checkpoint.fp8 import FP8, read_scheme
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.checkpoint.source import Checkpoint
from shark_llm.compile.dev_directory import check_replaceable
from shark_llm.compile.targets import CompileTarget, get_target
from shark_llm.compile.workspace_estimate import ModuleShape
from shark_llm.errors import CapacityError, UsageError
from shark_llm.export.signatures import ExportSettings, cache_specs, entry_points, softmax_sums
from shark_llm.hub import HubModel, HubSettings, Metadata, fetch_metadata, parse_model
from shark_llm.model.config import ModelConfig, config_from_hf, config_to_dict
from shark_llm.planner import (
    MODULE_ALLOWANCE,
    DeviceMemory,
    check_capacity,
    choose_max_model_len,
    device_memory,
    required_bytes,
)
from shark_llm.reuse import Force
from shark_llm.sharding.apply import TORCH_DTYPES
from shark_llm.sharding.plan import plan_parameters, plan_ranks

DtypeChoice = Literal["auto", "bf16", "f16", "f32"]
WeightsChoice = Literal["checkpoint", "dummy"]
Ensured = Literal["export", "compile"]
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """What to build, and where to."""

    model: str
    """A local directory or .gguf file, a hub id or URL."""
    out_dir: Path
    dev_dir: Path | None = None
    target: str = "host"
    gpu: str | None = None
    """One of planner.GPUS, for its memory; None: the target's usual one."""
    tp: int = 1
    dtype: DtypeChoice = "auto"
    """auto: the checkpoint's own dtype; bf16 for quantized checkpoints."""
    weights_dtype: WeightsDtype | None = None
    """What matrices are quantized to; None: they are of `dtype`."""
    weights: WeightsChoice = "checkpoint"
    """dummy: from config.json alone, every weight being the same number."""
    page_size: int = ExportSettings.page_size
    batch_sizes_prefill: tuple[int, ...] = ExportSettings.batch_sizes_prefill
    batch_sizes_decode: tuple[int, ...] | None = None
    """None: those of the target."""
    max_model_len: int | None = None
    """None: what the model was made for."""
    extra_compile_args: tuple[str, ...] = ()
    save_intermediates: bool = False
    force: bool = False
    """Build what does not fit its GPU, and quantize what is quantized already."""
    verify: bool = True
    """Run the golden check where the target can run."""
    cache_dir: Path | None = None
    """Of the stage cache; None: only the bundle in the same place is looked at."""
    cache_policy: CachePolicy = "on"
    quick_check: bool = False
    """Know an identical bundle, and a local checkpoint that was read before, by sizes and times."""
    ensure: tuple[Ensured, ...] = ()
    """Stages that run whatever is there already; `HubSettings.force_download` is another one."""
    hub: HubSettings = field(default_factory=HubSettings)

    @property
    def forced(self) -> Force:
        """The stages that may reuse nothing."""
        everything = self.cache_policy in ("off", "redo")
        return Force(
            archives=everything,
            export=everything or "export" in self.ensure,
            compile=everything or "compile" in self.ensure,
        )

    def open_cache(self, note: Note) -> StageCache:
        """The stage cache; one that has and keeps nothing where there is none."""
        if self.cache_dir is None:
            return StageCache(Path(), "off", note)
        return StageCache(cache_root(self.cache_dir), self.cache_policy, note)


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """All that is known before work begins."""

    settings: BuildSettings
    name: str
    revision: str | None
    config: ModelConfig
    target: CompileTarget
    device: DeviceMemory
    export: ExportSettings
    plan: dict[str, Placement]
    max_model_len: int
    file_bytes: dict[str, int]
    """Exact size of each parameter archive."""
    from_hub: bool
    """`revision` is then a commit, and the weights are those of it."""
    fetch_bytes: int
    """Of weights that are still on the hub."""
    checkpoint: Checkpoint | None
    """None: its weights are still on the hub."""
    notes: tuple[str, ...] = ()
    """What was forced."""

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags of iree-compile but input and output."""
        return (
            *self.target.compile_flags(self.settings.tp),
            *self.settings.extra_compile_args,
        )

    @property
    def needed_bytes(self) -> int:
        """Of disk for a bundle of which nothing is reused."""
        return sum(self.file_bytes.values()) + MODULE_ALLOWANCE

    @property
    def out_dir(self) -> Path:
        return self.settings.out_dir.expanduser().absolute()

    @property
    def dev_dir(self) -> Path | None:
        dev_dir = self.settings.dev_dir
        return None if dev_dir is None else dev_dir.expanduser().resolve()


def check_settings(settings: BuildSettings) -> CompileTarget:
    """Refuse what is wrong whatever the model is; returns the target's row. Raises UsageError."""
    target = get_target(settings.target, quantized=settings.weights_dtype is not None)
    device_memory(target, settings.gpu)
    _export_settings(settings, target, "f32")
    if settings.save_intermediates and settings.dev_dir is None:
        raise UsageError("--save-intermediates needs --output-dev-artifacts-dir to put them in")
    if settings.dev_dir is not None:
        out_dir = settings.out_dir.expanduser().resolve()
        dev_dir = settings.dev_dir.expanduser().resolve()
        if out_dir.is_relative_to(dev_dir) or dev_dir.is_relative_to(out_dir):
            raise UsageError(
                f"--output-artifacts-dir {out_dir} and --output-dev-artifacts-dir {dev_dir} lie in "
                "each other, and each is replaced as a whole: choose two directories side by side"
            )
        check_replaceable(dev_dir)
    return target


def resolve(settings: BuildSettings) -> Metadata:
    """Find the model; from the hub only small files are fetched. Raises UsageError and HubError."""
    location = parse_model(settings.model, revision=settings.hub.revision)
    return fetch_metadata(location, settings=settings.hub)


def open_local(settings: BuildSettings, metadata: Metadata) -> Checkpoint | None:
    """The checkpoint, or None as long as weights are missing; dummy weights never are."""
    if settings.weights == "dummy":
        if metadata.config is None:
            raise UsageError(
                f"--weights dummy needs a config.json, and {metadata.name} has none: name the "
                "original model, or a directory or file with its config"
            )
        return ConfigOnlyCheckpoint(metadata.path)
    return None if metadata.missing_bytes else open_checkpoint(metadata.path)


def make_plan(
    settings: BuildSettings,
    metadata: Metadata,
    checkpoint: Checkpoint | None,
    target: CompileTarget,
) -> BuildPlan:
    """The plan, from config.json alone as long as `checkpoint` is None.

    Raises UnsupportedModelError, ShardingError, UsageError; CapacityError for what cannot fit its
    GPU, unless forced; and UsageError too for a GGUF file that is still on the hub, since it holds
    its config itself.
    """
    if checkpoint is not None:
        config = checkpoint.config
    elif metadata.config is not None:
        aux_files = read_aux_files(metadata.path)
        more = eos_token_ids(metadata.path, aux_files)
        config = config_from_hf(read_scheme(metadata.config)[0], more_eos_token_ids=more)
    else:
        raise UsageError(
            f"{metadata.name} holds its config itself and is not fetched yet "
            f"({metadata.missing_bytes / 1e6:.0f} MB): --dry-run can only plan what is in the cache"
        )
    dtype = _dtype(settings.dtype, checkpoint, config, metadata.path)
    weights_dtype = settings.weights_dtype
    placements = plan_parameters(config, settings.tp, quantized=weights_dtype is not None)
    length = choose_max_model_len(settings.max_model_len, config)
    device = device_memory(target, settings.gpu)
    dummy = settings.weights == "dummy"
    return BuildPlan(
        settings=settings,
        name=metadata.name,
        revision=metadata.revision,
        config=config,
        target=target,
        device=device,
        export=_export_settings(settings, target, dtype),
        plan=placements,
        max_model_len=length,
        file_bytes=required_bytes(
            config, tp=settings.tp, dtype=dtype, weights_dtype=weights_dtype, dummy=dummy
        ),
        from_hub=isinstance(metadata.location, HubModel),
        fetch_bytes=0 if dummy else metadata.missing_bytes,
        checkpoint=checkpoint,
        notes=(
            *_check_quantized_once(settings, metadata, checkpoint),
            *_check_memory(settings, config, device, target, dtype=dtype, max_model_len=length),
        ),
    )


def expected_manifest(plan: BuildPlan, digest: str) -> Manifest:
    """The manifest of what is asked for; module key, golden report and files come with the work."""
    config, target, tp = plan.config, plan.target, plan.settings.tp
    ranks = plan_ranks(config, tp)
    return Manifest(
        source=Source(name=plan.name, revision=plan.revision, digest=digest),
        config=config_to_dict(config),
        weights=plan.settings.weights,
        dtype=plan.export.dtype,
        weights_dtype=plan.settings.weights_dtype,
        kv_dtype=plan.export.dtype,
        tp=tp,
        plan=plan.plan,
        page_size=plan.export.page_size,
        max_model_len=plan.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        entry_points=entry_points(plan.export, config.vocab_size),
        softmax_sums=softmax_sums(plan.export, config.vocab_size),
        caches=cache_specs(config, plan.export, ranks),
        module_key="",
        archives=tuple(archive_name(rank) for rank in archive_ranks(tp)),
        target=Target(
            name=target.name,
            driver=target.driver,
            flags=plan.flags,
            cpu=target.cpu,
            cpu_features=target.cpu_features,
            memory_bytes=None if plan.device.is_shared else plan.device.num_bytes,
        ),
        versions=build_versions(),
        golden=None,
        files={},
    )


def build_versions() -> dict[str, str]:
    """Of everything that decides what a bundle holds."""
    packages = ("iree-base-compiler", "iree-base-runtime", "torch")
    return {
        "shark-llm": __version__,
        "shark-llm-source": _source_digest("model", "export", "sharding", "compile"),
        "shark-llm-weights-source": _source_digest("checkpoint", "sharding"),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def _source_digest(*folders: str) -> str:
    """Of those of this package's own files that decide what is computed: a changed exporter or
    dequantization is no reuse."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for folder in folders:
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _decode_sizes(settings: BuildSettings, target: CompileTarget) -> tuple[int, ...]:
    sizes = settings.batch_sizes_decode
    return target.batch_sizes_decode if sizes is None else sizes


def _export_settings(settings: BuildSettings, target: CompileTarget, dtype: str) -> ExportSettings:
    return replace(
        ExportSettings(),
        page_size=settings.page_size,
        batch_sizes_prefill=settings.batch_sizes_prefill,
        batch_sizes_decode=_decode_sizes(settings, target),
        dtype=dtype,
    )


def _dtype(
    choice: DtypeChoice, checkpoint: Checkpoint | None, config: ModelConfig, path: Path
) -> str:
    if choice != "auto":
        return choice
    if checkpoint is None:  # what config.json says; the tensors' own dtype decides once it is there
        return _DTYPE_NAMES.get(config.torch_dtype or "", "f32")
    own = str(checkpoint.parameters["token_embd.weight"].dtype).removeprefix("torch.")
    # GGUF weights are read as f32 when they are quantized: f32 would only store noise.
    return "bf16" if path.suffix == ".gguf" and own == "float32" else _DTYPE_NAMES[own]


def _check_quantized_once(
    settings: BuildSettings, metadata: Metadata, checkpoint: Checkpoint | None
) -> tuple[str, ...]:
    """Refuse to round weights a second time; when forced, the refusal is a note."""
    if settings.weights_dtype is None or settings.weights == "dummy":
        return ()
    if checkpoint is not None:
        held = checkpoint.quantized_as
    else:  # a GGUF file on the hub was refused before
        assert metadata.config is not None
        held = None if read_scheme(metadata.config)[1] is None else FP8
    if held is None:
        return ()
    if not settings.force:
        raise UsageError(
            f"{metadata.name} is quantized already ({held}): --weights-dtype "
            f"{settings.weights_dtype} would round its weights a second time; build from the "
            "unquantized model, or leave the flag away; --force builds it all the same"
        )
    return (
        f"forced: {metadata.name} is quantized already ({held}), and its weights are rounded a "
        "second time",
    )


def _check_memory(
    settings: BuildSettings,
    config: ModelConfig,
    device: DeviceMemory,
    target: CompileTarget,
    *,
    dtype: str,
    max_model_len: int,
) -> tuple[str, ...]:
    """Refuse what cannot fit a GPU; when forced, the refusal is a note.

    A CPU's memory is another on every machine: there it is for the server to say.
    """
    if device.is_shared:
        return ()
    module = ModuleShape(
        attention_form=target.attention_form,
        page_size=settings.page_size,
        batch_sizes_prefill=settings.batch_sizes_prefill,
        batch_sizes_decode=_decode_sizes(settings, target),
    )
    try:
        check_capacity(
            config,
            device,
            tp=settings.tp,
            dtype=dtype,
            weights_dtype=settings.weights_dtype,
            max_model_len=max_model_len,
            module=module,
        )
    except CapacityError as error:
        if not settings.force:
            raise CapacityError(f"{error}; --force builds it all the same") from error
        return (f"forced: {error}",)
    return ()
