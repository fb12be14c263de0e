"""A Markdown reproduction of a compiled module, to paste into a report of a compiler bug."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shark_llm import __version__
from shark_llm.artifacts.manifest import MANIFEST_NAME, Manifest, read_manifest
from shark_llm.compile.compiler import compiler_command
from shark_llm.compile.dev_artifacts import MLIR_NAME, SCRIPT_NAME
from shark_llm.compile.dev_directory import read_report
from shark_llm.errors import ArtifactError
from shark_llm.reuse import manifest_digest

_PACKAGES = ("iree-base-compiler", "iree-base-runtime", "torch", "numpy")


def repro_markdown(directory: Path, dev_dir: Path | None) -> str:
    """The report of the bundle at `directory`; with `dev_dir`, files are named as they lie there.

    Raises ArtifactError when there is no bundle, or the dev artifacts are of another one.
    """
    directory = directory.expanduser().absolute()
    manifest = read_manifest(directory / MANIFEST_NAME)
    report: dict[str, Any] = {}
    if dev_dir is not None:
        dev_dir = dev_dir.expanduser().absolute()
        report = _matching_report(directory, dev_dir)
    sections = [
        _headline(manifest),
        _versions(manifest),
        _machine(),
        _build_command(manifest, report, dev_dir),
        _compile_command(manifest, dev_dir),
        _benchmark(manifest, dev_dir),
        _files(manifest),
    ]
    return "\n\n".join(sections) + "\n"


def _matching_report(directory: Path, dev_dir: Path) -> dict[str, Any]:
    report = read_report(dev_dir)
    if not report:
        raise ArtifactError(
            f"{dev_dir} holds no dev artifacts: name what --output-dev-artifacts-dir was when the "
            "bundle was built"
        )
    if report.get("manifest_sha256") != manifest_digest(directory):
        raise ArtifactError(
            f"{dev_dir} holds the dev artifacts of another build ({report.get('bundle')}): run "
            "shark-compile again with both directories"
        )
    return report


def _headline(manifest: Manifest) -> str:
    revision = f" at `{manifest.source.revision}`" if manifest.source.revision else ""
    golden = manifest.golden
    checked = (
        "not run when it was built"
        if golden is None
        else f"passed, largest error {golden.max_abs_error:.3g} of {golden.tolerance:.3g} allowed"
    )
    built = (
        f"{manifest.source.name}, {manifest.precision}, tp {manifest.tp}, {manifest.target.name}"
    )
    return (
        f"### {built}\n\n"
        f"- model: {manifest.source.name}{revision}, digest `{manifest.source.digest}`\n"
        f"- entry points: {', '.join(f'`{entry.name}`' for entry in manifest.entry_points)}\n"
        f"- golden check against the eager model: {checked}\n\n"
        "What goes wrong: (please fill in)"
    )


def _versions(manifest: Manifest) -> str:
    here = {"shark-llm": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            here[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            here[package] = "not installed"
    names = sorted({*here, *manifest.versions})
    rows = [f"| {n} | {manifest.versions.get(n, '')} | {here.get(n, '')} |" for n in names]
    return "\n".join(
        ["### Versions", "", "| package | built with | here |", "|---|---|---|", *rows]
    )


def _machine() -> str:
    lines = [
        f"- CPU: {cpu_model()}, {os.cpu_count()} cores",
        f"- memory: {_total_memory()}",
        f"- kernel: {platform.system()} {platform.release()}, {platform.machine()}, "
        f"{' '.join(platform.libc_ver())}",
    ]
    return "\n".join(["### Machine (where this report was made)", "", *lines])


def cpu_model() -> str:
    """The name that the kernel has for this CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"


def _total_memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return "unknown"
    return f"{total / (1 << 30):.1f} GiB"


def build_command(manifest: Manifest, settings: Mapping[str, Any]) -> list[str]:
    """The shark-compile command; from the manifest alone when `settings` (of a report) is empty."""
    sizes = {
        phase: [str(e.batch_size) for e in manifest.entry_points if e.phase == phase]
        for phase in ("prefill", "decode")
    }
    command = ["shark-compile", "--hf-model"]
    if manifest.source.revision:  # a commit of the hub's, which anybody can build from
        command += [manifest.source.name, "--revision", manifest.source.revision]
    else:
        command.append(settings.get("model") or manifest.source.name)
    command += ["--dtype", manifest.dtype, "--compile-target", manifest.target.name]
    if manifest.weights_dtype is not None:
        command += ["--weights-dtype", manifest.weights_dtype]
    command += ["--tp", str(manifest.tp), "--page-size", str(manifest.page_size)]
    command += ["--max-model-len", str(manifest.max_model_len)]
    command += ["--batch-sizes-prefill", *sizes["prefill"]]
    command += ["--batch-sizes-decode", *sizes["decode"]]
    extra: Sequence[str] = settings.get("extra_compile_args", ())
    return command + [f"--extra-compile-arg={flag}" for flag in extra]


def _build_command(manifest: Manifest, report: Mapping[str, Any], dev_dir: Path | None) -> str:
    command = build_command(manifest, report.get("settings", {}))
    command += ["--output-artifacts-dir", "bundle", "--output-dev-artifacts-dir", "dev"]
    note = (
        ""
        if report
        else "\n\nMade from the manifest: flags of `--extra-compile-arg` are among those of "
        "iree-compile below, and the model is named as the manifest names it."
    )
    return f"### Build\n\n{_shell([command])}{note}"


def _compile_command(manifest: Manifest, dev_dir: Path | None) -> str:
    source = (
        f"`{dev_dir / MLIR_NAME}` (please attach it); `{dev_dir / SCRIPT_NAME}` runs the command."
        if dev_dir is not None
        else f"The build above writes it to `dev/{MLIR_NAME}`, and `dev/{SCRIPT_NAME}` runs the "
        "command; with `--save-intermediates` also every phase of the compiler."
    )
    command = compiler_command(MLIR_NAME, manifest.module, manifest.target.flags)
    return f"### Compile\n\nThe MLIR: {source}\n\n{_shell([command])}"


def _benchmark(manifest: Manifest, dev_dir: Path | None) -> str:
    if dev_dir is None:
        flagfile = "dev/benchmark-flags.txt"
        return f"### Run\n\n{_shell([['iree-benchmark-module', f'--flagfile={flagfile}']])}"
    path = dev_dir / "benchmark-flags.txt"
    try:
        flags = path.read_text().rstrip()
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read ({error.strerror}): run shark-compile again with "
            f"--output-dev-artifacts-dir {dev_dir}"
        ) from error
    command = _shell([["iree-benchmark-module", f"--flagfile={path}"]])
    return f"### Run\n\n{command}\n\nThe flagfile:\n\n```text\n{flags}\n```"


def _files(manifest: Manifest) -> str:
    rows = [
        f"| {name} | {info.size} | `{info.sha256}` |"
        for name, info in sorted(manifest.files.items())
    ]
    key = f"Module key (MLIR, flags and compiler): `{manifest.module_key}`"
    table = ["| file | bytes | sha256 |", "|---|---|---|", *rows]
    return "\n".join(["### Files", "", *table, "", key])


def _shell(commands: Sequence[Sequence[str]]) -> str:
    return "\n".join(["```sh", *(shlex.join(command) for command in commands), "```"])
