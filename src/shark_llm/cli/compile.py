"""shark-compile: parse, build, print. Without a subcommand it builds a bundle."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer

from shark_llm.artifacts.manifest import WEIGHTS_DTYPES
from shark_llm.artifacts.stage_cache import CACHE_POLICIES, cache_root
from shark_llm.cli import cache as cache_cli
from shark_llm.cli import model_flags as flags
from shark_llm.cli import plan as plan_cli
from shark_llm.cli import serve as serve_cli
from shark_llm.cli import tools
from shark_llm.cli.build_text import plan_lines, result_lines
from shark_llm.cli.command_line import run_app
from shark_llm.cli.packages import require_compile_packages, version_line
from shark_llm.errors import SharkError, UsageError

if TYPE_CHECKING:
    from shark_llm.artifacts.manifest import WeightsDtype
    from shark_llm.artifacts.stage_cache import CachePolicy
    from shark_llm.build_plan import DtypeChoice, Ensured, WeightsChoice

PROGRAM = "shark-compile"
MULTI_VALUE_FLAGS = {
    **serve_cli.MULTI_VALUE_FLAGS,
    "--batch-sizes-prefill": int,
    "--batch-sizes-decode": int,
}
WEIGHTS = ("checkpoint", "dummy")
PROGRESS = ("auto", "json")
SHARDING_MODES = tuple(f"tp{n}" for n in range(1, flags.MAX_TP + 1))

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Turn a Hugging Face Llama into a bundle that shark-serve serves.",
)
app.command("serve")(serve_cli.serve)
app.command("plan")(plan_cli.plan)
app.command("verify")(tools.verify)
app.command("inspect")(tools.inspect)
app.command("repro")(tools.repro)
app.add_typer(cache_cli.app, name="cache")

_MODEL, _TARGET = flags.MODEL, flags.TARGET
_OUTPUT = "Output"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_line(PROGRAM))
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
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A supported model's name, or a TOML file: the defaults of all other flags of "
            "model and target.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    revision: flags.Revision = None,
    hf_cache_dir: flags.HfCacheDir = None,
    hf_token: flags.HfToken = None,
    dtype: flags.Dtype = None,
    weights_dtype: flags.WeightsDtypeFlag = None,
    weights: Annotated[
        str,
        typer.Option(
            help="checkpoint, or dummy: from config.json alone, for compiling and benchmarks; "
            "archives of some kilobytes, in which all weights are one number.",
            rich_help_panel=_MODEL,
        ),
    ] = "checkpoint",
    max_model_len: flags.MaxModelLen = None,
    compile_target: flags.Target = None,
    gpu: flags.Gpu = None,
    sharding_mode: Annotated[
        str | None,
        typer.Option(
            help="tp1 to tp8: over how many devices. Default: tp1.", rich_help_panel=_TARGET
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="The same as a number.", rich_help_panel=_TARGET)
    ] = None,
    batch_sizes_prefill: flags.BatchSizesPrefill = None,
    batch_sizes_decode: flags.BatchSizesDecode = None,
    page_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a KV cache page, a power of two. Default: 16.", rich_help_panel=_TARGET
        ),
    ] = None,
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
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Build what does not fit its GPU, and quantize what is quantized already.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print what would be done and written.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    cache_dir: flags.CacheDir = None,
    cache_policy: flags.CachePolicyFlag = "on",
    ensure_download: flags.EnsureDownload = False,
    ensure_export: flags.EnsureExport = False,
    ensure_compile: flags.EnsureCompile = False,
    quick_check: Annotated[
        bool,
        typer.Option(
            "--quick-check",
            help="Know an identical bundle, and a local checkpoint that was read before, by sizes "
            "and times, as rsync does, without reading every byte.",
            rich_help_panel=flags.CACHE,
        ),
    ] = False,
    progress: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(PROGRESS)}: lines for people, or JSON lines for programs. auto is "
            "live on a terminal and plain elsewhere."
        ),
    ] = "auto",
    end_with_stdin: Annotated[
        bool,
        typer.Option(
            "--end-with-stdin",
            hidden=True,
            help="End as for SIGTERM when standard input is closed: by whoever started this.",
        ),
    ] = False,
    debug: flags.Debug = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show versions and exit."
        ),
    ] = False,
) -> None:
    """Compile a checkpoint into a bundle, or run a subcommand."""
    if context.invoked_subcommand is not None:
        _refuse_build_flags(context)
        return
    if hf_model is None and recipe is None:
        raise UsageError(
            "--hf-model is missing: name a directory, a .gguf file, an id or a URL, or a --recipe"
        )
    if output_artifacts_dir is None and not dry_run:
        raise UsageError("--output-artifacts-dir is missing: say where the bundle goes")
    flags.check_choice("--dtype", dtype, flags.DTYPES)
    flags.check_choice("--weights-dtype", weights_dtype, WEIGHTS_DTYPES)
    flags.check_choice("--weights", weights, WEIGHTS)
    flags.check_choice("--cache-policy", cache_policy, CACHE_POLICIES)
    flags.check_choice("--progress", progress, PROGRESS)
    degree = _tp(sharding_mode, tp)
    require_compile_packages()
    # Imported here, so that --help and a wrong flag answer at once.
    from rich.console import Console

    from shark_llm.build import BuildSettings, build, plan_build
    from shark_llm.cli.recipe_flags import departures, recipe_settings
    from shark_llm.cli.reporter import end_when_closed, make_reporter
    from shark_llm.hub import HubSettings
    from shark_llm.recipes import load_recipe

    chosen = None if recipe is None else load_recipe(recipe)
    unset = BuildSettings(model="", out_dir=Path()) if chosen is None else recipe_settings(chosen)
    settings = replace(
        unset,
        model=hf_model or unset.model,
        out_dir=output_artifacts_dir or Path(),
        dev_dir=output_dev_artifacts_dir,
        target=compile_target or unset.target,
        gpu=gpu,
        tp=degree or unset.tp,
        dtype=cast("DtypeChoice", dtype or unset.dtype),
        weights_dtype=cast("WeightsDtype | None", weights_dtype),
        weights=cast("WeightsChoice", weights),
        page_size=page_size if page_size is not None else unset.page_size,
        batch_sizes_prefill=tuple(batch_sizes_prefill or unset.batch_sizes_prefill),
        batch_sizes_decode=tuple(batch_sizes_decode or ()) or unset.batch_sizes_decode,
        max_model_len=max_model_len if max_model_len is not None else unset.max_model_len,
        extra_compile_args=tuple(extra_compile_arg or ()),
        save_intermediates=save_intermediates,
        force=force,
        verify=verify_result,
        cache_dir=cache_root(cache_dir),
        cache_policy=cast("CachePolicy", cache_policy),
        quick_check=quick_check,
        ensure=_ensured(export=ensure_export, compile=ensure_compile),
        hub=HubSettings(
            revision=revision,
            cache_dir=hf_cache_dir,
            token=hf_token,
            force_download=ensure_download,
        ),
    )
    console = Console()
    reporter = make_reporter(console, as_json=progress == "json")
    if end_with_stdin:
        end_when_closed(sys.stdin.fileno())
    # As for Ctrl-C: the compiler is ended and what is half written removed.
    signal.signal(signal.SIGTERM, _end)
    try:
        for note in () if chosen is None else departures(chosen, settings):
            reporter.note(note)
        if dry_run:
            lines = plan_lines(plan_build(settings, reporter))
        else:
            lines = result_lines(build(settings, reporter))
    except SharkError as error:
        reporter.fail(error)
        raise
    finally:
        reporter.close()
    reporter.say(lines)


def _end(signal_number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal_number)  # what shells report for a program that a signal has ended


def _ensured(**stages: bool) -> tuple[Ensured, ...]:
    return cast("tuple[Ensured, ...]", tuple(name for name, given in stages.items() if given))


def _tp(mode: str | None, tp: int | None) -> int | None:
    """--sharding-mode and --tp say the same; None: neither is given."""
    if mode is not None and mode not in SHARDING_MODES:
        raise UsageError(f"--sharding-mode is {mode!r}; it must be one of tp1 to tp{flags.MAX_TP}")
    flags.check_tp(tp)
    if mode is not None and tp is not None and mode != f"tp{tp}":
        raise UsageError(f"--sharding-mode {mode} and --tp {tp} contradict each other: give one")
    if mode is not None:
        return int(mode.removeprefix("tp"))
    return tp


def _refuse_build_flags(context: typer.Context) -> None:
    """Flags before a subcommand would be for building, and have no effect."""
    given = [
        name
        for name in context.params
        if name != "debug"
        and (source := context.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(
            f"{flags} before {context.invoked_subcommand!r} has no effect: flags of a subcommand "
            "come behind it, and building is shark-compile without one"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """The console script."""
    run_app(app, PROGRAM, argv, MULTI_VALUE_FLAGS)


if __name__ == "__main__":
    main()
