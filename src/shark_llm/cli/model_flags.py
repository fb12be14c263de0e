"""Flags that several commands share: which model, for what, and what of the cache is used.

Each is an annotated type, so that a command says `revision: Revision = None`. `shark-serve` has the
same flags with an environment variable each; it takes their texts from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shark_llm.artifacts.manifest import WEIGHTS_DTYPES
from shark_llm.artifacts.stage_cache import CACHE_POLICIES
from shark_llm.errors import UsageError

MODEL, TARGET, CACHE = "Model", "Target", "Cache"  # panels of --help
DTYPES = ("auto", "bf16", "f16", "f32")
MAX_TP = 8

REVISION_HELP = "Branch, tag or commit on the hub. Default: that of the URL, else main."
HF_CACHE_DIR_HELP = (
    "Where downloads from the hub are kept. Default: as the hub's own tools do (HF_HUB_CACHE, "
    "HF_HOME)."
)
HF_TOKEN_HELP = (
    "A token of the hub. Prefer the environment variable HF_TOKEN, which other users of the "
    "machine cannot see. Never printed or stored."
)
DTYPE_HELP = (
    f"Of weights and KV cache: {', '.join(DTYPES)}. auto is the checkpoint's own, bf16 for "
    "quantized ones."
)
WEIGHTS_DTYPE_HELP = (
    f"{', '.join(WEIGHTS_DTYPES)}: quantize the matrices, each output channel with a scale. "
    "Default: all is of --dtype."
)
COMPILE_TARGET_HELP = (
    "What runs the module: host (this CPU), x86-64-v3, x86-64-v4, gfx942, gfx950, gfx90a, "
    "gfx1100, sm_80 or sm_89."
)
BATCH_SIZES_HELP = "Batch sizes to compile {} for, separated by spaces. Default: {}."
CACHE_DIR_HELP = (
    "Where results of stages are kept for other builds. Default: shark in ~/.cache, or in "
    "XDG_CACHE_HOME."
)
CACHE_POLICY_HELP = (
    f"{', '.join(CACHE_POLICIES)}: use the cache and add to it; neither, and use nothing of an "
    "older bundle; make all anew and add it; use it and add nothing."
)
ENSURE_DOWNLOAD_HELP = "Fetch the model again, though the hub's cache has it."
ENSURE_EXPORT_HELP = "Export again, though the same was exported before."
ENSURE_COMPILE_HELP = "Compile again, though the same was compiled before."

Revision = Annotated[str | None, typer.Option(help=REVISION_HELP, rich_help_panel=MODEL)]
HfCacheDir = Annotated[Path | None, typer.Option(help=HF_CACHE_DIR_HELP, rich_help_panel=MODEL)]
HfToken = Annotated[
    str | None, typer.Option(help=HF_TOKEN_HELP, rich_help_panel=MODEL, show_default=False)
]
Dtype = Annotated[
    str | None, typer.Option(help=f"{DTYPE_HELP} Default: auto.", rich_help_panel=MODEL)
]
WeightsDtypeFlag = Annotated[
    str | None, typer.Option(help=WEIGHTS_DTYPE_HELP, rich_help_panel=MODEL)
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of a sequence. Default: what the model was made for.",
        rich_help_panel=MODEL,
    ),
]
Target = Annotated[
    str | None,
    typer.Option(help=f"{COMPILE_TARGET_HELP} Default: host.", rich_help_panel=TARGET),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="Which GPU of the target, for its memory: mi250x, mi300a, mi300x, mi325x or mi355x. "
        "Default: the target's usual one.",
        rich_help_panel=TARGET,
    ),
]
BatchSizesPrefill = Annotated[
    list[int] | None,
    typer.Option(help=BATCH_SIZES_HELP.format("prefill", "1 4"), rich_help_panel=TARGET),
]
BatchSizesDecode = Annotated[
    list[int] | None,
    typer.Option(
        help=BATCH_SIZES_HELP.format("decode", "1 4 8, on CPUs 16 too"), rich_help_panel=TARGET
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(help=CACHE_DIR_HELP, envvar="SHARK_CACHE_DIR", rich_help_panel=CACHE),
]
CachePolicyFlag = Annotated[str, typer.Option(help=CACHE_POLICY_HELP, rich_help_panel=CACHE)]
EnsureDownload = Annotated[
    bool, typer.Option("--ensure-download", help=ENSURE_DOWNLOAD_HELP, rich_help_panel=CACHE)
]
EnsureExport = Annotated[
    bool, typer.Option("--ensure-export", help=ENSURE_EXPORT_HELP, rich_help_panel=CACHE)
]
EnsureCompile = Annotated[
    bool, typer.Option("--ensure-compile", help=ENSURE_COMPILE_HELP, rich_help_panel=CACHE)
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check_choice(flag: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless `value` is one of `choices`, or None."""
    if value is not None and value not in choices:
        raise UsageError(f"{flag} is {value!r}; it must be one of {', '.join(choices)}")


def check_tp(tp: int | None) -> None:
    """Raise UsageError unless `tp` is in 1 to 8, or None."""
    if tp is not None and not 1 <= tp <= MAX_TP:
        raise UsageError(f"--tp is {tp}; it must be in 1 to {MAX_TP}")
