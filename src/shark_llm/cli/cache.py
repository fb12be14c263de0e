"""shark-compile cache: where the stage cache is, what it holds, and making room."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shark_llm.artifacts.stage_cache import cache_root
from shark_llm.cli import model_flags as flags
from shark_llm.errors import UsageError

if TYPE_CHECKING:
    from shark_llm.artifacts.cache_contents import Content

DEFAULT_UNUSED_DAYS = 30.0

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    help="What earlier builds have left for later ones: list, prune, path.",
)


@app.command("list")
def list_contents(
    cache_dir: flags.CacheDir = None, as_json: flags.Json = False, debug: flags.Debug = False
) -> None:
    """Show what the cache holds, with sizes and last use; what was used last comes last."""
    from shark_llm.artifacts.cache_contents import cache_contents

    root = cache_root(cache_dir)
    contents = cache_contents(root)
    if as_json:
        rows = [asdict(content) | {"path": str(content.path)} for content in contents]
        typer.echo(json.dumps({"cache": str(root), "contents": rows}, indent=2))
        return
    _print_table(contents)
    total = sum(content.num_bytes for content in contents)
    freed = sum(content.freed_bytes for content in contents)
    typer.echo(
        f"{root}: {len(contents)} entries, {_size(total)}, of which {_size(freed)} are shared with "
        "no other file"
    )


@app.command("prune")
def prune_contents(
    cache_dir: flags.CacheDir = None,
    unused_days: Annotated[
        float, typer.Option(help="Remove what has not been used for that many days; 0 is all.")
    ] = DEFAULT_UNUSED_DAYS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed.")
    ] = False,
    debug: flags.Debug = False,
) -> None:
    """Remove what was not used for long, what is damaged, and what killed builds have left."""
    from shark_llm.artifacts.cache_contents import prune

    if not unused_days >= 0:
        raise UsageError(f"--unused-days is {unused_days:g}; it must be at least 0")
    root = cache_root(cache_dir)
    pruned = prune(root, unused_days=unused_days, dry_run=dry_run)
    _print_table(pruned.contents)
    freed = sum(content.freed_bytes for content in pruned.contents) + pruned.leftover_bytes
    done = "would be removed" if dry_run else "removed"
    typer.echo(f"{root}: {len(pruned.contents)} entries {done}, {_size(freed)} freed")


@app.command("path")
def show_path(cache_dir: flags.CacheDir = None, debug: flags.Debug = False) -> None:
    """Print the cache's directory."""
    typer.echo(cache_root(cache_dir))


def _print_table(contents: Sequence[Content]) -> None:
    if contents:
        typer.echo(f"{'kind':<9} {'size':>10}  {'last use':<16}  {'key':<12}  what")
    for content in contents:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(content.last_use))
        typer.echo(
            f"{content.kind:<9} {_size(content.num_bytes):>10}  {used}  "
            f"{content.path.name[:12]:<12}  {content.what}"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
