"""From a checkpoint to a published bundle: the visible list of stages.

    resolve   name -> local files, config checked                       hub, checkpoint
    plan      target, tensor parallel plan, sizes, disk space           compile.targets, sharding.plan
    shard     checkpoint -> model.irpa, model.rank{r}.irpa              sharding.apply
    export    config + plan -> model.mlir                               export
    compile   model.mlir -> model.vmfb                                  compile.compiler
    verify    compiled module == eager model, where it can run          golden
    publish   manifest, digests, atomic rename                          artifacts.publish

Nothing of the old bundle is touched before `publish`. What an older bundle in the same place has
already (archives of the same weights and plan, a module of the same source and flags) is linked
from it instead of made again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shark_llm import __version__
from shark_llm.artifacts.bundle import Bundle, open_bundle
from shark_llm.artifacts.cpu import missing_cpu_features
from shark_llm.artifacts.irpa import Identity, archive_name, archive_ranks
from shark_llm.artifacts.manifest import GoldenReport, Manifest, Placement, Source, Target
from shark_llm.artifacts.publish import Staging, publish
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.checkpoint.source import Checkpoint
from shark_llm.compile.compiler import run_compiler
from shark_llm.compile.dev_artifacts import write_dev_artifacts
from shark_llm.compile.targets import CompileTarget, get_target
from shark_llm.errors import ArtifactError, UsageError
from shark_llm.export.compose import ExportedModule, export_module
from shark_llm.export.signatures import ExportSettings, cache_specs, entry_points
from shark_llm.golden import check_golden, golden_pages, read_parameters
from shark_llm.model.config import ModelConfig, config_to_dict
from shark_llm.planner import required_bytes
from shark_llm.runtime.devices import DeviceConfig
from shark_llm.runtime.module import load_runner
from shark_llm.sharding.apply import TORCH_DTYPES, write_archives
from shark_llm.sharding.plan import plan_parameters, plan_ranks
from shark_llm.stages import Reporter, StageClock, StageRecord

STAGES = ("resolve", "plan", "shard", "export", "compile", "verify", "publish")
MODULE_ALLOWANCE_BYTES = 64 << 20
"""Disk space kept for what has no known size before it is made: module, tokenizer, manifest."""

DtypeChoice = Literal["auto", "bf16", "f16", "f32"]


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """What to build, and where to."""

    model: str
    """A local directory or .gguf file, a hub id or URL."""
    out_dir: Path
    dev_dir: Path | None = None
    target: str = "host"
    tp: int = 1
    dtype: DtypeChoice = "auto"
    """auto: the checkpoint's own dtype; bf16 for quantized checkpoints."""
    page_size: int = ExportSettings.page_size
    batch_sizes_prefill: tuple[int, ...] = ExportSettings.batch_sizes_prefill
    batch_sizes_decode: tuple[int, ...] = ExportSettings.batch_sizes_decode
    max_model_len: int | None = None
    """None: what the model was made for."""
    extra_compile_args: tuple[str, ...] = ()
    save_intermediates: bool = False
    verify: bool = True
    """Run the golden check where the target can run."""


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """All that is known before work begins."""

    settings: BuildSettings
    checkpoint: Checkpoint
    name: str
    revision: str | None
    target: CompileTarget
    export: ExportSettings
    plan: dict[str, Placement]
    max_model_len: int
    file_bytes: dict[str, int]
    """Exact size of each parameter archive."""

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags of iree-compile but input and output."""
        return (
            *self.target.compile_flags(self.settings.tp),
            *self.settings.extra_compile_args,
        )

    @property
    def can_run_here(self) -> bool:
        """Whether this machine can run the module: a CPU target, with the instructions it needs."""
        return self.target.driver == "local-task" and not missing_cpu_features(
            self.target.cpu_features
        )

    @property
    def needed_bytes(self) -> int:
        return sum(self.file_bytes.values()) + MODULE_ALLOWANCE_BYTES


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """A published bundle and what was done for it."""

    path: Path
    manifest: Manifest
    stages: tuple[StageRecord, ...]
    reused: bool
    """The bundle was there already, and is exactly what was asked for."""


def plan_build(settings: BuildSettings, reporter: Reporter) -> BuildPlan:
    """The stages resolve and plan: everything that can be refused is refused here."""
    clock = StageClock(reporter)
    with clock.stage("resolve", settings.model):
        target = get_target(settings.target)
        path, name, revision = resolve(settings.model)
        checkpoint = open_checkpoint(path)
        for note in checkpoint.notes:
            reporter.note(note)
    with clock.stage("plan", f"{target.name}, tp {settings.tp}"):
        config = checkpoint.config
        export = ExportSettings(
            page_size=settings.page_size,
            batch_sizes_prefill=settings.batch_sizes_prefill,
            batch_sizes_decode=settings.batch_sizes_decode,
            dtype=_dtype(settings.dtype, checkpoint, path),
        )
        plan = plan_parameters(config, settings.tp)
        return BuildPlan(
            settings=settings,
            checkpoint=checkpoint,
            name=name,
            revision=revision,
            target=target,
            export=export,
            plan=plan,
            max_model_len=_max_model_len(settings.max_model_len, config),
            file_bytes=required_bytes(config, tp=settings.tp, dtype=export.dtype),
        )


def build(settings: BuildSettings, reporter: Reporter) -> BuildResult:
    """Run all stages and publish the bundle at `settings.out_dir`."""
    plan = plan_build(settings, reporter)
    clock = StageClock(reporter)
    source = Source(name=plan.name, revision=plan.revision, digest=plan.checkpoint.digest())
    out_dir = settings.out_dir.expanduser().absolute()
    with publish(out_dir, needed_bytes=plan.needed_bytes, on_wait=reporter.note) as staging:
        old = _old_bundle(out_dir, reporter)
        expected = _manifest(plan, source, module_key="")
        if old is not None and _same_build(old.manifest, expected) and _dev_is_there(plan, old):
            reporter.note(f"{out_dir} is what was asked for already: nothing to do")
            return BuildResult(path=out_dir, manifest=old.manifest, stages=(), reused=True)
        with _dev_staging(settings.dev_dir) as dev:
            manifest = _make(plan, expected, old, staging, dev, clock)
            if dev is not None and settings.dev_dir is not None:
                dev_dir = settings.dev_dir.expanduser().absolute()
                write_dev_artifacts(dev, dev_dir=dev_dir, bundle_dir=out_dir, manifest=manifest)
                _write_report(dev, plan, clock)
    return BuildResult(path=out_dir, manifest=manifest, stages=tuple(clock.records), reused=False)


def _make(
    plan: BuildPlan,
    expected: Manifest,
    old: Bundle | None,
    staging: Staging,
    dev: Path | None,
    clock: StageClock,
) -> Manifest:
    """The stages shard to publish; returns the sealed manifest."""
    settings, checkpoint = plan.settings, plan.checkpoint
    linked: list[str] = []
    with clock.stage("shard", f"{sum(plan.file_bytes.values()) / 1e6:.0f} MB") as stage:
        if old is not None and _same_archives(old.manifest, expected):
            linked += _link(old, staging, expected.archives)
            stage.note = "reused"
        else:
            identity = Identity(
                model=expected.source.digest, tp=settings.tp, rank=None, dtype=plan.export.dtype
            )
            write_archives(
                checkpoint,
                plan.plan,
                identity=identity,
                out_dir=staging.path,
                progress=clock.reporter.progress,
            )
    entries = ", ".join(entry.name for entry in expected.entry_points)
    source = staging.path / "model.mlir"
    with clock.stage("export", entries):
        exported = export_module(
            plan.config,
            plan.plan,
            settings.tp,
            plan.export,
            plan.target.attention_form,
            plan.target.linear_form,
        )
        _check_signatures(exported, expected)
        source.write_text(exported.mlir)
    key = _module_key(exported.mlir, plan.flags)
    manifest = expected.model_copy(update={"module_key": key})
    with clock.stage("compile", plan.target.name) as stage:
        if old is not None and old.manifest.module_key == key and not settings.save_intermediates:
            linked += _link(old, staging, (manifest.module,))
            stage.note = "reused"
        else:
            extra = _intermediates(dev) if settings.save_intermediates else ()
            result = run_compiler(source, staging.path / manifest.module, (*plan.flags, *extra))
            stage.child_peak_bytes = result.peak_memory_bytes
    if dev is not None:
        shutil.copyfile(source, dev / "model.mlir")
    source.unlink()
    for name, data in checkpoint.aux_files.items():
        (staging.path / name).write_bytes(data)
    with clock.stage("verify", "compiled module against the eager model") as stage:
        golden = None
        if not settings.verify:
            stage.note = "skipped: --no-verify"
        elif not plan.can_run_here:
            stage.note = f"skipped: {plan.target.name} does not run on this machine"
        else:
            golden = _golden(plan, manifest, staging)
            stage.note = f"largest error {golden.max_abs_error:.2g}"
    with clock.stage("publish", str(staging.target)):
        sealed = staging.seal(manifest.model_copy(update={"golden": golden}))
        if old is not None:
            _check_linked(linked, old.manifest, sealed)
    return sealed


def resolve(model: str) -> tuple[Path, str, str | None]:
    """Local path, display name and revision of what `--hf-model` names."""
    path = Path(model).expanduser()
    if not path.exists():
        raise UsageError(f"--hf-model {model}: no such file or directory")
    resolved = path.resolve()
    return resolved, resolved.stem if resolved.is_file() else resolved.name, None


def _dtype(choice: DtypeChoice, checkpoint: Checkpoint, path: Path) -> str:
    if choice != "auto":
        return choice
    own = checkpoint.parameters["token_embd.weight"].dtype
    names = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()}
    # GGUF weights are read as f32 when they are quantized: f32 would only store noise.
    return "bf16" if path.suffix == ".gguf" and names[own] == "f32" else names[own]


def _max_model_len(asked: int | None, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if config.sliding_window is not None:
        limit = min(limit, config.sliding_window)
    if asked is not None and not 1 <= asked <= limit:
        raise UsageError(f"--max-model-len is {asked}: this model takes 1 to {limit}")
    return asked or limit


def _manifest(plan: BuildPlan, source: Source, *, module_key: str) -> Manifest:
    """The manifest of what is asked for; digests and golden report come later."""
    config, target, tp = plan.config, plan.target, plan.settings.tp
    ranks = plan_ranks(config, tp)
    return Manifest(
        source=source,
        config=config_to_dict(config),
        dtype=plan.export.dtype,
        kv_dtype=plan.export.dtype,
        tp=tp,
        plan=plan.plan,
        page_size=plan.export.page_size,
        max_model_len=plan.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        entry_points=entry_points(plan.export, config.vocab_size),
        caches=cache_specs(config, plan.export, ranks),
        module_key=module_key,
        archives=tuple(archive_name(rank) for rank in archive_ranks(tp)),
        target=Target(
            name=target.name,
            driver=target.driver,
            flags=plan.flags,
            cpu=target.cpu,
            cpu_features=target.cpu_features,
            memory_bytes=target.memory_bytes,
        ),
        versions=_versions(),
        golden=None,
        files={},
    )


def _versions() -> dict[str, str]:
    packages = ("iree-base-compiler", "iree-base-runtime", "torch")
    return {
        "shark-llm": __version__,
        "shark-llm-source": _source_digest(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def _source_digest() -> str:
    """Of this package's own files that decide what is computed: a changed exporter is no reuse."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for folder in ("model", "export", "sharding", "compile"):
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _module_key(mlir: str, flags: tuple[str, ...]) -> str:
    compiler = importlib.metadata.version("iree-base-compiler")
    digest = hashlib.sha256(json.dumps([compiler, *flags]).encode())
    digest.update(mlir.encode())
    return digest.hexdigest()


def _check_signatures(exported: ExportedModule, expected: Manifest) -> None:
    assert exported.entry_points == expected.entry_points
    assert exported.caches == expected.caches


def _old_bundle(out_dir: Path, reporter: Reporter) -> Bundle | None:
    """The bundle to reuse parts of, if there is a sound one."""
    if not (out_dir / "manifest.json").exists():
        return None
    try:
        return open_bundle(out_dir)
    except ArtifactError as error:
        reporter.note(f"the old bundle is not reused: {error}")
        return None


def _same_build(old: Manifest, expected: Manifest) -> bool:
    """Equal but for what only comes with the work itself."""
    made: dict[str, object] = {"files": {}, "golden": None, "module_key": ""}
    return old.model_copy(update=made) == expected.model_copy(update=made)


def _same_archives(old: Manifest, expected: Manifest) -> bool:
    return all(
        getattr(old, name) == getattr(expected, name)
        for name in ("source", "dtype", "tp", "plan", "weights", "archives")
    )


def _link(old: Bundle, staging: Staging, names: tuple[str, ...]) -> list[str]:
    """Hard links to files of the old bundle; copies where the file system has none."""
    for name in names:
        try:
            os.link(old.path / name, staging.path / name)
        except OSError:
            shutil.copyfile(old.path / name, staging.path / name)
    return list(names)


def _check_linked(linked: list[str], old: Manifest, sealed: Manifest) -> None:
    for name in linked:
        if old.files[name] != sealed.files[name]:
            raise ArtifactError(
                f"{name} of the old bundle has changed since it was published: delete the old "
                "bundle and build again"
            )


def _golden(plan: BuildPlan, manifest: Manifest, staging: Staging) -> GoldenReport:
    """Load what was just made, as the server will, and compare it with the eager model."""
    sizes = {
        path.name: {"size": path.stat().st_size, "sha256": ""} for path in staging.path.iterdir()
    }
    made = Manifest.model_validate({**manifest.model_dump(), "files": sizes})
    config = DeviceConfig(driver="local-task")
    tokens = (golden_pages(made) - 1) * made.page_size
    runner = load_runner(Bundle(path=staging.path, manifest=made), config, tokens)
    try:
        return check_golden(
            runner,
            made,
            plan.config,
            read_parameters(plan.checkpoint, TORCH_DTYPES[made.dtype]),
            narrow_operands=plan.target.linear_form.form == "plain",
        )
    finally:
        runner.close()


DEV_MARK = "build-report.json"


def _dev_is_there(plan: BuildPlan, old: Bundle) -> bool:
    """Whether the dev artifacts asked for are those of this bundle."""
    if plan.settings.save_intermediates:
        return False
    if plan.settings.dev_dir is None:
        return True
    try:
        report = json.loads((plan.settings.dev_dir.expanduser() / DEV_MARK).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(report, dict) and report.get("module_key") == old.manifest.module_key


@contextmanager
def _dev_staging(dev_dir: Path | None) -> Iterator[Path | None]:
    """A directory beside `dev_dir` that takes its place when the block ends normally."""
    if dev_dir is None:
        yield None
        return
    target = dev_dir.expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not (target / DEV_MARK).is_file():
            raise UsageError(
                f"--output-dev-artifacts-dir {target} holds something else ({DEV_MARK} is not in "
                "it): choose a new or empty directory"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.partial-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _intermediates(dev: Path | None) -> tuple[str, ...]:
    """Flags that make the compiler dump its phases and executables."""
    if dev is None:
        raise UsageError("--save-intermediates needs --output-dev-artifacts-dir to put them in")
    return (
        f"--dump-compilation-phases-to={dev / 'phases'}",
        f"--iree-hal-dump-executable-sources-to={dev / 'executable-sources'}",
        f"--iree-hal-dump-executable-benchmarks-to={dev / 'executable-benchmarks'}",
    )


def _write_report(dev: Path, plan: BuildPlan, clock: StageClock) -> None:
    """build-report.json: what each stage took."""
    settings = {key: str(value) for key, value in asdict(plan.settings).items()}
    report = {
        "model": plan.name,
        "settings": settings,
        "versions": _versions(),
        "stages": [asdict(record) for record in clock.records],
    }
    (dev / DEV_MARK).write_text(json.dumps(report, indent=2) + "\n")
