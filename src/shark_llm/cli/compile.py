"""shark-compile: parse, build, print. Without a subcommand it builds a bundle."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shark_llm import __version__
from shark_llm.cli import serve as serve_cli
from shark_llm.cli.command_line import run_app
from shark_llm.errors import UsageError

if TYPE_CHECKING:
    from shark_llm.build import BuildPlan, BuildResult

PROGRAM = "shark-compile"
MULTI_VALUE_FLAGS = (
    *serve_cli.MULTI_VALUE_FLAGS,
    "--batch-sizes-prefill",
    "--batch-sizes-decode",
)
DTYPES = ("auto", "bf16", "f16", "f32")
SHARDING_MODES = tuple(f"tp{n}" for n in range(1, 9))

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Turn a Hugging Face Llama into a bundle that shark-serve serves.",
)
app.command("serve")(serve_cli.serve)

_MODEL = "Model"
_TARGET = "Target"
_OUTPUT = "Output"


def version_line() -> str:
    """This package and what it compiles with, on one line."""
    packages = ("iree-base-compiler", "iree-base-runtime", "torch")
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return f"{PROGRAM} {__version__} ({', '.join(found)})"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_line())
        raise typer.Exit


@app.callback(invoke_without_command=True)
def build(
    context: typer.Context,
    hf_model: Annotated[
        str | None,
        typer.Option(
            help="A local directory or .gguf file, a Hugging Face id or URL.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help=f"Of weights and KV cache: {', '.join(DTYPES)}. auto is the checkpoint's own, bf16 "
            "for quantized ones.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a sequence. Default: what the model was made for.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    compile_target: Annotated[
        str,
        typer.Option(
            help="What runs the module: host (this CPU), x86-64-v3, x86-64-v4, gfx942, gfx950, "
            "gfx90a, gfx1100, sm_80 or sm_89.",
            rich_help_panel=_TARGET,
        ),
    ] = "host",
    sharding_mode: Annotated[
        str | None,
        typer.Option(
            help="tp1 to tp8: over how many devices. Default: tp1.", rich_help_panel=_TARGET
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="The same as a number.", rich_help_panel=_TARGET)
    ] = None,
    batch_sizes_prefill: Annotated[
        list[int] | None,
        typer.Option(
            help="Batch sizes to compile prefill for, separated by spaces. Default: 1 4.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    batch_sizes_decode: Annotated[
        list[int] | None,
        typer.Option(
            help="Batch sizes to compile decode for, separated by spaces. Default: 1 4 8.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    page_size: Annotated[
        int, typer.Option(help="Tokens of a KV cache page.", rich_help_panel=_TARGET)
    ] = 16,
    extra_compile_arg: Annotated[
        list[str] | None,
        typer.Option(
            help="A further flag for iree-compile, as --extra-compile-arg=--flag=value; may be "
            "given several times.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    output_artifacts_dir: Annotated[
        Path | None, typer.Option(help="Where the bundle goes.", rich_help_panel=_OUTPUT)
    ] = None,
    output_dev_artifacts_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where MLIR, compile command, flagfiles and report go. Default: not written.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    save_intermediates: Annotated[
        bool,
        typer.Option(
            "--save-intermediates",
            help="Add the compiler's phases, executable sources and per-dispatch benchmarks.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    verify_result: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Compare the compiled module with the model before publishing, where it can run.",
            rich_help_panel=_OUTPUT,
        ),
    ] = True,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print what would be done and written.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_OUTPUT)
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show versions and exit."
        ),
    ] = False,
) -> None:
    """Compile a checkpoint into a bundle, or run a subcommand."""
    if context.invoked_subcommand is not None:
        return
    if hf_model is None:
        raise UsageError("--hf-model is missing: name a directory, a .gguf file, an id or a URL")
    if output_artifacts_dir is None and not dry_run:
        raise UsageError("--output-artifacts-dir is missing: say where the bundle goes")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    # Imported here, so that --help and a wrong flag answer at once.
    from rich.console import Console

    from shark_llm.build import BuildSettings, build, plan_build
    from shark_llm.cli.reporter import make_reporter

    defaults = BuildSettings(model="", out_dir=Path())
    settings = BuildSettings(
        model=hf_model,
        out_dir=output_artifacts_dir or Path(),
        dev_dir=output_dev_artifacts_dir,
        target=compile_target,
        tp=_tp(sharding_mode, tp),
        dtype=dtype,
        page_size=page_size,
        batch_sizes_prefill=tuple(batch_sizes_prefill or defaults.batch_sizes_prefill),
        batch_sizes_decode=tuple(batch_sizes_decode or defaults.batch_sizes_decode),
        max_model_len=max_model_len,
        extra_compile_args=tuple(extra_compile_arg or ()),
        save_intermediates=save_intermediates,
        verify=verify_result,
    )
    console = Console()
    reporter = make_reporter(console)
    try:
        if dry_run:
            lines = _plan_lines(plan_build(settings, reporter))
        else:
            lines = _result_lines(build(settings, reporter))
    finally:
        reporter.close()
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _tp(mode: str | None, tp: int | None) -> int:
    """--sharding-mode and --tp say the same."""
    if mode is not None and mode not in SHARDING_MODES:
        raise UsageError(f"--sharding-mode is {mode!r}; it must be one of tp1 to tp8")
    if mode is not None and tp is not None and mode != f"tp{tp}":
        raise UsageError(f"--sharding-mode {mode} and --tp {tp} contradict each other: give one")
    if mode is not None:
        return int(mode.removeprefix("tp"))
    return 1 if tp is None else tp


def _plan_lines(plan: BuildPlan) -> list[str]:
    """What --dry-run prints."""
    config, settings = plan.config, plan.settings
    free = _free_bytes(settings.out_dir)
    fits = "fits" if plan.needed_bytes <= free else "does NOT fit"
    return [
        f"model    {plan.name}: {config.architecture}, {config.num_layers} layers, "
        f"{config.num_heads} query and {config.num_kv_heads} kv heads of {config.head_dim}",
        f"target   {plan.target.name} ({plan.target.description}), tp {settings.tp}, "
        f"{plan.export.dtype}, pages of {plan.export.page_size}, up to {plan.max_model_len} tokens",
        f"entries  prefill_bs{{{_listed(plan.export.batch_sizes_prefill)}}} "
        f"decode_bs{{{_listed(plan.export.batch_sizes_decode)}}}",
        f"flags    {' '.join(plan.flags)}",
        *(f"file     {name}: {size} bytes" for name, size in plan.file_bytes.items()),
        "file     model.vmfb: known after compiling, some megabytes",
        f"disk     {plan.needed_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free: {fits}",
        f"check    {'golden check runs here' if plan.can_run_here else 'cannot run here'}",
    ]


def _result_lines(result: BuildResult) -> list[str]:
    manifest = result.manifest
    size = sum(info.size for info in manifest.files.values())
    seconds = sum(record.seconds for record in result.stages)
    took = "reused" if result.reused else f"{seconds:.0f} s"
    return [
        f"bundle   {result.path} ({size / 1e6:.0f} MB, {took})",
        f"serve    shark-serve --artifacts-dir {result.path}",
    ]


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _free_bytes(path: Path) -> int:
    """Of the file system that `path` is, or will be, on."""
    import shutil

    existing = path.expanduser().absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def main(argv: Sequence[str] | None = None) -> None:
    """The console script."""
    run_app(app, PROGRAM, argv, MULTI_VALUE_FLAGS)


if __name__ == "__main__":
    main()
