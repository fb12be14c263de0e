"""shark-serve: parse, check, serve. `shark-compile serve` is the same command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Annotated

import typer

from shark_llm import __version__
from shark_llm.cli.command_line import run_app
from shark_llm.engine.settings import SCHEDULING_POLICIES, EngineSettings
from shark_llm.errors import ArtifactError, UsageError
from shark_llm.server.settings import ServerSettings

PROGRAM = "shark-serve"
MULTI_VALUE_FLAGS = {"--device-ids": int, "--api-key": str, "--cors-allow-origin": str}
LOG_LEVELS = ("debug", "info", "warning", "error")

_ENGINE = EngineSettings()
_SERVER = ServerSettings(served_model_name="")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_MODEL = "Model"
_DEVICE = "Device and memory"
_SCHEDULING = "Scheduling"
_HTTP = "HTTP"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.command()
def serve(
    artifacts_dir: Annotated[
        Path, typer.Option(help="The bundle that shark-compile wrote.", rich_help_panel=_MODEL)
    ],
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="The name that clients use. Default: the model's own.", rich_help_panel=_MODEL
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of prompt and output together. Default: what the bundle allows.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    allow_dummy_weights: Annotated[
        bool,
        typer.Option(
            "--allow-dummy-weights",
            help="Serve a bundle without real weights, for measuring.",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="local-task, local-sync, hip or cuda. Default: what the bundle was compiled for.",
            rich_help_panel=_DEVICE,
        ),
    ] = None,
    device_ids: Annotated[
        list[int] | None,
        typer.Option(
            help="Which devices, one per rank, separated by spaces.", rich_help_panel=_DEVICE
        ),
    ] = None,
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the KV cache holds. Default: what fits.", rich_help_panel=_DEVICE
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most requests that run at once.", rich_help_panel=_SCHEDULING)
    ] = _ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Token budget of one step.", rich_help_panel=_SCHEDULING)
    ] = _ENGINE.max_num_batched_tokens,
    max_num_queued_requests: Annotated[
        int,
        typer.Option(
            help="Requests that may wait beyond those that run; more get a 503.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = _ENGINE.max_num_queued_requests,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse the KV pages of equal prompt beginnings.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = _ENGINE.enable_prefix_caching,
    scheduling_policy: Annotated[
        str,
        typer.Option(
            help=f"{' or '.join(SCHEDULING_POLICIES)}: first come first served, or longest cached "
            "prefix first.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = _ENGINE.scheduling_policy,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a request may take. Default: no limit.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = _SERVER.request_timeout,
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=_HTTP)
    ] = _SERVER.host,
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", rich_help_panel=_HTTP)
    ] = _SERVER.port,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that clients must send; several may be given. Prefer the environment "
            "variable, which other users of the machine cannot see.",
            envvar="SHARK_API_KEY",
            show_default=False,
            rich_help_panel=_HTTP,
        ),
    ] = None,
    cors_allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origins whose web pages may call this server; * is any.", rich_help_panel=_HTTP
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that running requests get to finish after SIGTERM.",
            rich_help_panel=_HTTP,
        ),
    ] = _SERVER.shutdown_timeout,
    log_level: Annotated[
        str, typer.Option(help=f"One of {', '.join(LOG_LEVELS)}.", rich_help_panel=_HTTP)
    ] = "info",
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_HTTP)
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Serve a compiled Llama over HTTP, in the form of the OpenAI API."""
    if scheduling_policy not in SCHEDULING_POLICIES:
        raise UsageError(
            f"--scheduling-policy is {scheduling_policy!r}; "
            f"it must be one of {', '.join(SCHEDULING_POLICIES)}"
        )
    _check_positive(
        {
            "--max-model-len": max_model_len,
            "--kv-cache-tokens": kv_cache_tokens,
            "--request-timeout": request_timeout,
        }
    )
    if not shutdown_timeout >= 0:
        raise UsageError(f"--shutdown-timeout is {shutdown_timeout}; it must be at least 0")
    keys = tuple(api_key or ())
    if not all(key.strip() == key and key.isascii() and key for key in keys):
        raise UsageError("an --api-key is empty, or not plain ASCII without spaces; choose another")
    engine_settings = EngineSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_queued_requests=max_num_queued_requests,
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        scheduling_policy=scheduling_policy,
    )
    _configure_logging(log_level, debug=debug)
    raise typer.Exit(
        _run(
            artifacts_dir,
            engine_settings,
            served_model_name=served_model_name,
            allow_dummy_weights=allow_dummy_weights,
            device=device,
            device_ids=None if not device_ids else tuple(device_ids),
            kv_cache_tokens=kv_cache_tokens,
            host=host,
            port=port,
            api_keys=keys,
            cors_allow_origins=tuple(cors_allow_origin or ()),
            request_timeout=request_timeout,
            shutdown_timeout=shutdown_timeout,
            debug=debug,
        )
    )


def _run(
    artifacts_dir: Path,
    engine_settings: EngineSettings,
    *,
    served_model_name: str | None,
    allow_dummy_weights: bool,
    device: str | None,
    device_ids: tuple[int, ...] | None,
    kv_cache_tokens: int | None,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    cors_allow_origins: tuple[str, ...],
    request_timeout: float | None,
    shutdown_timeout: float,
    debug: bool,
) -> int:
    # Imported here, so that --help and a wrong flag answer at once; the device's side comes last.
    from shark_llm.server.lifecycle import Loaded, Report, bind, run_server

    sock = bind(host, port)
    try:
        from shark_llm.artifacts.bundle import open_bundle
        from shark_llm.runtime.devices import DeviceConfig
        from shark_llm.server.loading import start_engine

        bundle = open_bundle(artifacts_dir)
        if bundle.manifest.weights == "dummy" and not allow_dummy_weights:
            raise ArtifactError(
                f"{artifacts_dir} has dummy weights and would answer with noise; build it from a "
                "checkpoint, or allow it for measuring with --allow-dummy-weights"
            )
    except BaseException:
        sock.close()
        raise
    manifest = bundle.manifest
    name = served_model_name or manifest.source.name
    config = DeviceConfig(driver=device or manifest.target.driver, device_ids=device_ids)

    def load(report: Report) -> Loaded:
        from shark_llm.runtime.module import load_runner

        report("loading the module and mapping its parameters")
        runner = load_runner(bundle, config, kv_cache_tokens, engine_settings.max_model_len)
        report("starting the engine")
        notes: list[str] = []
        loaded = start_engine(
            runner,
            engine_settings,
            directory=bundle.path,
            manifest=manifest,
            served_model_name=name,
            notes=notes,
        )
        for note in notes:
            logging.getLogger("shark_llm.server").warning(note)
        return loaded

    settings = ServerSettings(
        host=host,
        port=port,
        served_model_name=name,
        api_keys=api_keys,
        cors_allow_origins=cors_allow_origins,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
        debug=debug,
    )
    return run_server(settings, load, sock)


def _check_positive(values: dict[str, int | float | None]) -> None:
    for flag, value in values.items():
        if value is not None and not value > 0:
            raise UsageError(f"{flag} is {value}; it must be more than 0")


class _OneLine(logging.Formatter):
    """One line per record; an exception is named at its end, its traceback left out."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        short = copy(record)
        short.exc_info = short.exc_text = short.stack_info = None
        suffix = "" if error is None else f" ({type(error).__name__}: {error})"
        return " ".join((super().format(short) + suffix).split())


def _configure_logging(level: str, *, debug: bool) -> None:
    if level not in LOG_LEVELS:
        raise UsageError(f"--log-level is {level!r}; it must be one of {', '.join(LOG_LEVELS)}")
    formatter = logging.Formatter if debug else _OneLine
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def main(argv: Sequence[str] | None = None) -> None:
    """The console script: one line per error, the exit code of the error's class."""
    run_app(app, PROGRAM, argv, MULTI_VALUE_FLAGS)


if __name__ == "__main__":
    main()
