"""shark-compile verify, inspect and repro: is a bundle sound, what is it, how to report it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shark_llm.cli import model_flags as flags

_Bundle = Annotated[Path, typer.Argument(metavar="DIR", help="A bundle that shark-compile wrote.")]


def verify(
    directory: _Bundle,
    digests: Annotated[
        bool,
        typer.Option("--digests/--no-digests", help="Read every byte of every file."),
    ] = True,
    golden: Annotated[
        bool,
        typer.Option(
            "--golden/--no-golden",
            help="Run the module and compare it with the model, where that works here.",
        ),
    ] = True,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Check a bundle: versions, target, archives, sizes, digests and what it computes.

    Exits with 0 when it is sound, with 1 when a check fails.
    """
    from shark_llm.cli.reporter import live_bytes
    from shark_llm.inspection.verify import verify_bundle

    checks = []
    with live_bytes("digests") as progress:
        for check in verify_bundle(directory, digests=digests, golden=golden, progress=progress):
            checks.append(check)
            if not as_json:
                typer.echo(f"{check.status:<8} {check.name:<26} {check.detail}")
    failed = sum(check.status == "FAILED" for check in checks)
    if as_json:
        result = {
            "bundle": str(directory),
            "ok": not failed,
            "checks": [asdict(check) for check in checks],
        }
        typer.echo(json.dumps(result, indent=2))
    elif failed:
        typer.echo(f"{directory}: {failed} of {len(checks)} checks failed: copy or build it again")
    else:
        typer.echo(f"{directory}: sound")
    raise typer.Exit(1 if failed else 0)


def inspect(directory: _Bundle, as_json: flags.Json = False, debug: flags.Debug = False) -> None:
    """Show what a bundle holds, from its manifest."""
    from shark_llm.artifacts.manifest import MANIFEST_NAME, read_manifest
    from shark_llm.inspection.summary import summarize, summary_lines

    manifest = read_manifest(directory.expanduser() / MANIFEST_NAME)
    if as_json:
        typer.echo(json.dumps(summarize(manifest), indent=2))
    else:
        typer.echo("\n".join(summary_lines(manifest)))


def repro(
    directory: _Bundle,
    dev: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The bundle's dev artifacts: names MLIR and flagfile."),
    ] = None,
    debug: flags.Debug = False,
) -> None:
    """Print a reproduction in Markdown, to paste into a report of a compiler bug."""
    from shark_llm.inspection.repro import repro_markdown

    typer.echo(repro_markdown(directory, dev), nl=False)
