"""shark-compile plan: will it fit, at which tp, and what would each rank hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shark_llm.artifacts.manifest import WEIGHTS_DTYPES
from shark_llm.cli import model_flags as flags
from shark_llm.cli.packages import require_compile_packages
from shark_llm.compile.workspace import PREFILL_TOKENS
from shark_llm.errors import UsageError

if TYPE_CHECKING:
    from shark_llm.artifacts.manifest import WeightsDtype
    from shark_llm.hub import Metadata
    from shark_llm.model.config import ModelConfig

_MODEL, _TARGET = flags.MODEL, flags.TARGET


def plan(
    hf_model: Annotated[
        str,
        typer.Option(
            help="A directory or file with a config.json, a .gguf file, a Hugging Face id or URL. "
            "No weights are fetched.",
            rich_help_panel=_MODEL,
        ),
    ],
    revision: flags.Revision = None,
    hf_cache_dir: flags.HfCacheDir = None,
    hf_token: flags.HfToken = None,
    dtype: flags.Dtype = None,
    weights_dtype: flags.WeightsDtypeFlag = None,
    max_model_len: flags.MaxModelLen = None,
    max_num_seqs: Annotated[
        int,
        typer.Option(
            help="Sequences of that length that must have room at once.", rich_help_panel=_MODEL
        ),
    ] = 1,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of a step, as shark-serve will take them: of long ones the workspace is "
            "large.",
            rich_help_panel=_MODEL,
        ),
    ] = PREFILL_TOKENS,
    compile_target: flags.Target = None,
    gpu: flags.Gpu = None,
    tp: Annotated[
        int | None,
        typer.Option(help="Show also what each rank holds at this tp.", rich_help_panel=_TARGET),
    ] = None,
    dev_artifacts_dir: Annotated[
        Path | None,
        typer.Option(
            help="Dev artifacts of a build with --save-intermediates: at its tp, the workspace is "
            "what that module allocates.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Show for each tp what a rank needs and how many KV tokens remain, from config.json alone."""
    flags.check_choice("--dtype", dtype, flags.DTYPES)
    flags.check_choice("--weights-dtype", weights_dtype, WEIGHTS_DTYPES)
    for flag, value in (
        ("--max-num-seqs", max_num_seqs),
        ("--max-num-batched-tokens", max_num_batched_tokens),
    ):
        if value < 1:
            raise UsageError(f"{flag} is {value}; it must be at least 1")
    require_compile_packages()
    # Imported here, so that --help and a wrong flag answer at once.
    from rich.console import Console

    from shark_llm.cli.plan_text import PlanReport, print_report, report_to_dict
    from shark_llm.compile.targets import HOST, get_target
    from shark_llm.compile.workspace import built_workspace
    from shark_llm.compile.workspace_estimate import ModuleShape
    from shark_llm.hub import HubSettings, fetch_metadata, parse_model
    from shark_llm.planner import choose_max_model_len, device_memory, plan_memory
    from shark_llm.sharding.plan import plan_ranks

    target = get_target(compile_target or HOST)
    device = device_memory(target, gpu)
    hub = HubSettings(revision=revision, cache_dir=hf_cache_dir, token=hf_token)
    metadata = fetch_metadata(parse_model(hf_model, revision=revision), settings=hub)
    config = _read_config(metadata)
    ranks = None if tp is None else plan_ranks(config, tp)  # refuses a tp that cannot be
    length = choose_max_model_len(max_model_len, config)
    chosen = _own_dtype(config, metadata.path) if dtype in (None, "auto") else dtype
    quantized_to = cast("WeightsDtype | None", weights_dtype)
    workspace = None
    if dev_artifacts_dir is not None:
        workspace = built_workspace(
            dev_artifacts_dir,
            model=metadata.name,
            target=target.name,
            context_tokens=length,
            prefill_tokens=max_num_batched_tokens,
        )
    report = PlanReport(
        name=metadata.name,
        config=config,
        target=target.name,
        device=device,
        dtype=chosen,
        weights_dtype=quantized_to,
        max_model_len=length,
        step_tokens=max_num_batched_tokens,
        memory=plan_memory(
            config,
            memory_bytes=device.num_bytes,
            is_shared=device.is_shared,
            dtype=chosen,
            weights_dtype=quantized_to,
            kv_dtype=chosen,
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            module=ModuleShape(
                attention_form=target.attention_form,
                prefill_tokens=max_num_batched_tokens,
                batch_sizes_decode=target.batch_sizes_decode,
            ),
            workspace=workspace,
        ),
        ranks=ranks,
        notes=metadata.notes,
    )
    if as_json:
        typer.echo(json.dumps(report_to_dict(report), indent=2))
    else:
        print_report(report, Console())


def _read_config(metadata: Metadata) -> ModelConfig:
    """The model's shape, without a byte of its weights."""
    from shark_llm.checkpoint.config_only import ConfigOnlyCheckpoint
    from shark_llm.checkpoint.open import open_checkpoint

    if metadata.config is not None:
        return ConfigOnlyCheckpoint(metadata.path).config
    if metadata.missing_bytes:
        raise UsageError(
            f"{metadata.name} holds its config itself and is not fetched yet: plan with the "
            "original model's id, or fetch the file and name its path"
        )
    return open_checkpoint(metadata.path).config  # a GGUF file, of which only the header is read


def _own_dtype(config: ModelConfig, path: Path) -> str:
    """What a build with --dtype auto takes, as far as the config tells."""
    names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    return names.get(config.torch_dtype or "", "bf16" if path.suffix == ".gguf" else "f32")
