"""scripts/bench shard: what sharded builds take, and docs/sharding.md with what came out."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import page, shard_builds, shard_writing
from benchmarks.peers import ROOT

PAGE = ROOT / "docs" / "sharding.md"
_MARK = "written by scripts/bench shard render"


def add_options(commands: Any) -> None:
    """The subcommand `shard` of scripts/bench, with subcommands of its own."""
    text = "full-size builds, their depth, and the writing of archives, for docs/sharding.md"
    kinds = commands.add_parser("shard", help=text, description=text).add_subparsers(
        dest="kind", required=True, metavar="KIND"
    )
    for kind, shapes, text in (
        ("compile", shard_builds.FULL_SIZE, "compile published shapes with dummy weights"),
        ("depth", shard_builds.DEPTHS, "the same at several depths of one shape"),
    ):
        command = kinds.add_parser(kind, help=text, description=text)
        command.add_argument(
            "--build",
            type=_shape,
            nargs="+",
            default=list(shapes),
            metavar="RECIPE:TP[:LAYERS]",
            help=f"what is built, unless it was measured before; default: {_listed(shapes)}",
        )
    text = "write archives beside cp of the same bytes"
    command = kinds.add_parser("write", help=text, description=text)
    command.add_argument("--rounds", type=int, default=7, help="of each side, in alternation")
    text = "write the tables of docs/sharding.md from the results in docs/sharding"
    kinds.add_parser("render", help=text, description=text)


def run(options: argparse.Namespace) -> None:
    """What the command line says."""
    if options.kind in ("compile", "depth"):
        shard_builds.measure(options.build)
    elif options.kind == "write":
        shard_writing.measure(options.rounds)
    text = render(PAGE.read_text())
    if text != PAGE.read_text():
        PAGE.write_text(text)
        print(f"bench: wrote {PAGE.relative_to(ROOT)}")


def render(text: str) -> str:
    """The page with its tables made anew from what is kept."""
    for name, body in (
        ("builds", shard_builds.tables(shard_builds.read())),
        ("writing", shard_writing.table(shard_writing.read())),
    ):
        begin, end = f"<!-- {name}: {_MARK} -->", f"<!-- end of {name} -->"
        text = page.between(text, begin, end, body)
    return text


def _listed(shapes: tuple[shard_builds.Shape, ...]) -> str:
    return " ".join(map(str, shapes))


def _shape(text: str) -> shard_builds.Shape:
    try:
        return shard_builds.parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not RECIPE:TP or RECIPE:TP:LAYERS"
        ) from error
