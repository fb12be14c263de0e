"""What shark-serve serves, in one of three ways that exclude each other:

--artifacts-dir DIR                                   a bundle of shark-compile
--model-path M [--tp N --compile-target T ...]        a model, of which the bundle is built
--tokenizer-json T --model-config C --vmfb V --parameters A ...    a bundle taken apart
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from shark_llm.artifacts.manifest import WEIGHTS_DTYPES
from shark_llm.artifacts.stage_cache import BUNDLES_NAME, CACHE_POLICIES, cache_root
from shark_llm.cli import model_flags as flags
from shark_llm.cli.build_process import run_build
from shark_llm.cli.packages import require_compile_packages
from shark_llm.errors import CompileError, UsageError

if TYPE_CHECKING:
    from shark_llm.artifacts.bundle import Bundle
    from shark_llm.server.lifecycle import Report

GPU_DEVICES = ("hip", "cuda")
MULTI_VALUE_FLAGS = {
    "--parameters": str,
    "--batch-sizes-prefill": int,
    "--batch-sizes-decode": int,
}
_MODEL, _BUILD, _PARTS = flags.MODEL, "Building", "Precompiled parts"


def setting(name: str, panel: str, help: str, *spellings: str, **options: Any) -> Any:
    """A flag that may also come from SHARK_<NAME>, and from the file that --config names."""
    env = f"SHARK_{name.upper()}"
    return typer.Option(*spellings, help=help, envvar=env, rich_help_panel=panel, **options)


ArtifactsDir = Annotated[
    Path | None, setting("artifacts_dir", _MODEL, "The bundle that shark-compile wrote.")
]
ModelPath = Annotated[
    str | None,
    setting(
        "model_path",
        _MODEL,
        "In place of a bundle: a local directory or .gguf file, a Hugging Face id or URL. The "
        "bundle is built in the cache, unless it is there.",
        "--model-path",
        "--hf-model",
    ),
]
VerifyDigests = Annotated[
    bool,
    setting(
        "verify_digests",
        _MODEL,
        "Read every byte of the bundle and compare it with the manifest before loading.",
        "--verify-digests",
    ),
]
Revision = Annotated[str | None, setting("revision", _BUILD, flags.REVISION_HELP)]
HfCacheDir = Annotated[Path | None, setting("hf_cache_dir", _BUILD, flags.HF_CACHE_DIR_HELP)]
HfToken = Annotated[
    str | None, setting("hf_token", _BUILD, flags.HF_TOKEN_HELP, show_default=False)
]
Tp = Annotated[int | None, setting("tp", _BUILD, "1 to 8: over how many devices. Default: 1.")]
Target = Annotated[
    str | None,
    setting("compile_target", _BUILD, f"{flags.COMPILE_TARGET_HELP} Default: host."),
]
Dtype = Annotated[str | None, setting("dtype", _BUILD, f"{flags.DTYPE_HELP} Default: auto.")]
WeightsDtypeFlag = Annotated[str | None, setting("weights_dtype", _BUILD, flags.WEIGHTS_DTYPE_HELP)]
BatchSizesPrefill = Annotated[
    list[int] | None,
    setting("batch_sizes_prefill", _BUILD, flags.BATCH_SIZES_HELP.format("prefill", "1 4")),
]
BatchSizesDecode = Annotated[
    list[int] | None,
    setting(
        "batch_sizes_decode",
        _BUILD,
        flags.BATCH_SIZES_HELP.format("decode", "1 4 8, on CPUs 16 too"),
    ),
]
CacheDir = Annotated[Path | None, setting("cache_dir", _BUILD, flags.CACHE_DIR_HELP)]
CachePolicyFlag = Annotated[
    str | None,
    setting("cache_policy", _BUILD, f"{flags.CACHE_POLICY_HELP} Default: on."),
]
EnsureDownload = Annotated[
    bool, setting("ensure_download", _BUILD, flags.ENSURE_DOWNLOAD_HELP, "--ensure-download")
]
EnsureExport = Annotated[
    bool, setting("ensure_export", _BUILD, flags.ENSURE_EXPORT_HELP, "--ensure-export")
]
EnsureCompile = Annotated[
    bool, setting("ensure_compile", _BUILD, flags.ENSURE_COMPILE_HELP, "--ensure-compile")
]
TokenizerJson = Annotated[
    Path | None,
    setting("tokenizer_json", _PARTS, "tokenizer.json, the bundle's other small files beside it."),
]
ModelConfig = Annotated[
    Path | None, setting("model_config", _PARTS, "The manifest.json of the bundle.")
]
Vmfb = Annotated[Path | None, setting("vmfb", _PARTS, "The compiled module.")]
Parameters = Annotated[
    list[str] | None,
    setting("parameters", _PARTS, "The parameter archives of all ranks, separated by spaces."),
]


@dataclass(frozen=True, kw_only=True)
class PartPaths:
    """The four flags of a bundle taken apart."""

    tokenizer_json: Path
    model_config: Path
    vmfb: Path
    parameters: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class ModelToBuild:
    """A model, and how its bundle is built; None is shark-compile's own default."""

    model: str
    revision: str | None = None
    hf_cache_dir: Path | None = None
    hf_token: str | None = field(default=None, repr=False)
    tp: int | None = None
    compile_target: str | None = None
    dtype: str | None = None
    weights_dtype: str | None = None
    batch_sizes_prefill: tuple[int, ...] = ()
    batch_sizes_decode: tuple[int, ...] = ()
    cache_dir: Path | None = None
    cache_policy: str | None = None
    ensure: tuple[str, ...] = ()
    """Of download, export and compile."""

    @property
    def name(self) -> str:
        """As the hub or the disk calls the model: what clients call it, unless they are told."""
        if "://" in self.model:
            return "/".join(urlsplit(self.model).path.strip("/").split("/")[:2])
        path = Path(self.model).expanduser()
        if not path.exists():
            return self.model
        path = path.resolve()
        return path.stem if path.is_file() else path.name

    @property
    def out_dir(self) -> Path:
        """Where the bundle goes: one directory for each model and way to build it."""
        path = Path(self.model).expanduser()
        inputs = [
            str(path.resolve()) if path.exists() else self.model,
            self.revision,
            self.tp or 1,
            self.compile_target or "host",
            self.dtype or "auto",
            self.batch_sizes_prefill,
            self.batch_sizes_decode,
            # Not where it is not given: so a build of before this flag is found again.
            *([] if self.weights_dtype is None else [self.weights_dtype]),
        ]
        key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
        folder = re.sub(r"[^\w.-]", "_", self.name.replace("/", "--")).lstrip(".") or "model"
        return cache_root(self.cache_dir) / BUNDLES_NAME / folder / key

    def argv(self) -> list[str]:
        """The command line of shark-compile."""
        values: dict[str, object] = {
            "--hf-model": self.model,
            "--output-artifacts-dir": self.out_dir,
            "--cache-dir": cache_root(self.cache_dir),
            "--revision": self.revision,
            "--hf-cache-dir": self.hf_cache_dir,
            "--tp": self.tp,
            "--compile-target": self.compile_target,
            "--dtype": self.dtype,
            "--weights-dtype": self.weights_dtype,
            "--cache-policy": self.cache_policy,
        }
        words = [f"{flag}={value}" for flag, value in values.items() if value is not None]
        for phase, sizes in (
            ("prefill", self.batch_sizes_prefill),
            ("decode", self.batch_sizes_decode),
        ):
            if sizes:
                words += [f"--batch-sizes-{phase}", *map(str, sizes)]
        # What is loaded is checked by its sizes, or by --verify-digests of the server.
        return [*words, "--quick-check", *(f"--ensure-{stage}" for stage in self.ensure)]

    def check(self, device: str | None, device_ids: Sequence[int] | None) -> None:
        """Refuse before hours of compiling what cannot be served here. Raises UsageError and
        DeviceError; CompileError where the compile side is not installed."""
        try:
            require_compile_packages()
        except CompileError as error:
            if not self.out_dir.is_dir():
                raise
            raise CompileError(
                f"{error}; or serve the bundle that an earlier build left: --artifacts-dir "
                f"{self.out_dir}"
            ) from error
        flags.check_tp(self.tp)
        flags.check_choice("--dtype", self.dtype, flags.DTYPES)
        flags.check_choice("--weights-dtype", self.weights_dtype, WEIGHTS_DTYPES)
        flags.check_choice("--cache-policy", self.cache_policy, CACHE_POLICIES)
        if device in GPU_DEVICES and self.compile_target is None:
            raise UsageError(
                f"--device {device} needs --compile-target, which says for which GPU to compile, "
                "such as gfx942"
            )
        from shark_llm.runtime.devices import DeviceConfig, DeviceSet

        ids = None if device_ids is None else tuple(device_ids)
        config = DeviceConfig(driver=device or "local-task", device_ids=ids)
        config.resolved_ids(self.tp or 1)
        if device in GPU_DEVICES:
            DeviceSet(config, self.tp or 1).close()

    def build(self, report: Report) -> Path:
        """Build what is missing of the bundle; returns its directory. Raises what the build
        raises."""
        # By the environment: a command line can be seen by everybody on the machine.
        token = {} if self.hf_token is None else {"HF_TOKEN": self.hf_token}
        run_build(self.argv(), report, token)
        with suppress(OSError):  # a cache may be mounted read-only
            os.utime(self.out_dir)  # its last use, for `shark-compile cache`
        return self.out_dir


ModelSource = Path | PartPaths | ModelToBuild


def choose_source(
    *,
    artifacts_dir: Path | None,
    build: dict[str, Any],
    parts: dict[str, Any],
) -> ModelSource:
    """The one way that is meant. `build` and `parts` are flags by the names of the fields.

    Raises UsageError for none, for a mix, and for a way that lacks a flag.
    """
    given_build = {name: value for name, value in build.items() if value not in (None, (), [])}
    given_parts = {name: value for name, value in parts.items() if value not in (None, (), [])}
    # Where a cache is may stand in the environment of everybody.
    telling = [name for name in given_build if name != "cache_dir"]
    ways = [
        *([] if artifacts_dir is None else ["--artifacts-dir"]),
        *([_flag(telling[0])] if telling else []),
        *([_flag(next(iter(given_parts)))] if given_parts else []),
    ]
    if len(ways) > 1:
        raise UsageError(
            f"{' and '.join(ways)} do not go together: give a bundle (--artifacts-dir), a model to "
            "build it of (--model-path), or all its parts (--tokenizer-json, --model-config, "
            "--vmfb, --parameters)"
        )
    if artifacts_dir is not None:
        return artifacts_dir
    if telling:
        if "model" not in given_build:
            raise UsageError(
                f"{_flag(telling[0])} is for building, and there is no model: name it with "
                "--model-path"
            )
        return ModelToBuild(**given_build)
    if given_parts:
        if missing := [_flag(name) for name in parts if name not in given_parts]:
            raise UsageError(
                f"{', '.join(missing)} missing: a bundle taken apart needs all four of "
                f"{', '.join(_flag(name) for name in parts)}"
            )
        return PartPaths(**given_parts)
    raise UsageError(
        "nothing to serve: name a bundle with --artifacts-dir, or a model with --model-path"
    )


def _flag(name: str) -> str:
    spelled = {"model": "--model-path", "ensure": "an --ensure flag"}
    return spelled.get(name) or f"--{name.replace('_', '-')}"


def open_source(source: Path | PartPaths) -> Bundle:
    """Open what is compiled already. Raises ArtifactError and VersionMismatchError."""
    if isinstance(source, Path):
        from shark_llm.artifacts.bundle import open_bundle

        return open_bundle(source)
    from shark_llm.artifacts.parts import open_parts

    return open_parts(**vars(source))
