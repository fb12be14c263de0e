"""shark-serve: parse, check, serve. `shark-compile serve` is the same command."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Annotated

import typer

from shark_llm import __version__
from shark_llm.cli import serve_model as forms
from shark_llm.cli.command_line import run_app
from shark_llm.cli.config_file import read_config
from shark_llm.cli.serve_model import ModelSource, ModelToBuild, PartPaths, choose_source
from shark_llm.cli.serve_model import setting as _setting
from shark_llm.engine.settings import SCHEDULING_POLICIES, EngineSettings
from shark_llm.errors import ArtifactError, UsageError
from shark_llm.server.settings import ServerSettings

PROGRAM = "shark-serve"
MULTI_VALUE_FLAGS = {
    **forms.MULTI_VALUE_FLAGS,
    "--device-ids": int,
    "--api-key": str,
    "--cors-allow-origin": str,
}
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
    artifacts_dir: forms.ArtifactsDir = None,
    model_path: forms.ModelPath = None,
    served_model_name: Annotated[
        str | None,
        _setting(
            "served_model_name", _MODEL, "The name that clients use. Default: the model's own."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        _setting(
            "max_model_len",
            _MODEL,
            "Most tokens of prompt and output together. Default: what the bundle allows.",
        ),
    ] = None,
    allow_dummy_weights: Annotated[
        bool,
        _setting(
            "allow_dummy_weights",
            _MODEL,
            "Serve a bundle without real weights, for measuring.",
            "--allow-dummy-weights",
        ),
    ] = False,
    verify_digests: forms.VerifyDigests = False,
    revision: forms.Revision = None,
    hf_cache_dir: forms.HfCacheDir = None,
    hf_token: forms.HfToken = None,
    tp: forms.Tp = None,
    compile_target: forms.Target = None,
    dtype: forms.Dtype = None,
    weights_dtype: forms.WeightsDtypeFlag = None,
    batch_sizes_prefill: forms.BatchSizesPrefill = None,
    batch_sizes_decode: forms.BatchSizesDecode = None,
    cache_dir: forms.CacheDir = None,
    cache_policy: forms.CachePolicyFlag = None,
    ensure_download: forms.EnsureDownload = False,
    ensure_export: forms.EnsureExport = False,
    ensure_compile: forms.EnsureCompile = False,
    tokenizer_json: forms.TokenizerJson = None,
    model_config: forms.ModelConfig = None,
    vmfb: forms.Vmfb = None,
    parameters: forms.Parameters = None,
    device: Annotated[
        str | None,
        _setting(
            "device",
            _DEVICE,
            "local-task, local-sync, hip or cuda. Default: what the bundle was compiled for.",
        ),
    ] = None,
    device_ids: Annotated[
        list[int] | None,
        _setting("device_ids", _DEVICE, "Which devices, one per rank, separated by spaces."),
    ] = None,
    device_allocator: Annotated[
        str,
        _setting(
            "device_allocator",
            _DEVICE,
            "default, or caching: keep freed buffers for the next step, for long prefills on GPUs.",
        ),
    ] = "default",
    cpu_threads: Annotated[
        int | None,
        _setting(
            "cpu_threads",
            _DEVICE,
            "Worker threads of all local-task devices together, at least one each. Default: as "
            "many as cores.",
        ),
    ] = None,
    kv_cache_tokens: Annotated[
        int | None,
        _setting(
            "kv_cache_tokens",
            _DEVICE,
            "Tokens that the KV cache holds. Default: what the largest batch can use, at most half "
            "of the memory that the weights leave.",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, _setting("max_num_seqs", _SCHEDULING, "Most requests that run at once.")
    ] = _ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, _setting("max_num_batched_tokens", _SCHEDULING, "Token budget of one step.")
    ] = _ENGINE.max_num_batched_tokens,
    max_num_queued_requests: Annotated[
        int,
        _setting(
            "max_num_queued_requests",
            _SCHEDULING,
            "Requests that may wait beyond those that run; more get a 503.",
        ),
    ] = _ENGINE.max_num_queued_requests,
    enable_prefix_caching: Annotated[
        bool,
        _setting(
            "enable_prefix_caching",
            _SCHEDULING,
            "Reuse the KV pages of equal prompt beginnings.",
            "--enable-prefix-caching/--no-enable-prefix-caching",
        ),
    ] = _ENGINE.enable_prefix_caching,
    scheduling_policy: Annotated[
        str,
        _setting(
            "scheduling_policy",
            _SCHEDULING,
            f"{' or '.join(SCHEDULING_POLICIES)}: first come first served, or longest cached "
            "prefix first.",
        ),
    ] = _ENGINE.scheduling_policy,
    request_timeout: Annotated[
        float | None,
        _setting(
            "request_timeout",
            _SCHEDULING,
            "Seconds that a request may take. Default: no limit.",
        ),
    ] = _SERVER.request_timeout,
    host: Annotated[str, _setting("host", _HTTP, "Address to listen on.")] = _SERVER.host,
    port: Annotated[
        int, _setting("port", _HTTP, "Port to listen on; 0 takes a free one.")
    ] = _SERVER.port,
    api_key: Annotated[
        list[str] | None,
        _setting(
            "api_key",
            _HTTP,
            "A key that clients must send; several may be given. Prefer the file or the "
            "environment variable, which other users of the machine cannot see.",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _setting("api_key_file", _HTTP, "A file of such keys, one on each line."),
    ] = None,
    cors_allow_origin: Annotated[
        list[str] | None,
        _setting(
            "cors_allow_origin", _HTTP, "Origins whose web pages may call this server; * is any."
        ),
    ] = None,
    max_concurrent_requests: Annotated[
        int,
        _setting(
            "max_concurrent_requests",
            _HTTP,
            "HTTP requests that may be open at once; more get a 503. /health and /metrics are not "
            "counted.",
        ),
    ] = _SERVER.max_concurrent_requests,
    shutdown_timeout: Annotated[
        float,
        _setting(
            "shutdown_timeout",
            _HTTP,
            "Seconds that running requests get to finish after SIGTERM.",
        ),
    ] = _SERVER.shutdown_timeout,
    log_level: Annotated[
        str, _setting("log_level", _HTTP, f"One of {', '.join(LOG_LEVELS)}.")
    ] = "info",
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_HTTP)
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=read_config,
            is_eager=True,
            envvar="SHARK_CONFIG",
            help="A TOML file of these flags, without their dashes. Flags come first, then the "
            "environment, then the file.",
        ),
    ] = None,
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
            "--max-concurrent-requests": max_concurrent_requests,
        }
    )
    if not shutdown_timeout >= 0:
        raise UsageError(f"--shutdown-timeout is {shutdown_timeout}; it must be at least 0")
    keys = _api_keys(api_key or (), api_key_file)
    engine_settings = EngineSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_queued_requests=max_num_queued_requests,
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        scheduling_policy=scheduling_policy,
    )
    ensure = {"download": ensure_download, "export": ensure_export, "compile": ensure_compile}
    source = choose_source(
        artifacts_dir=artifacts_dir,
        build={
            "model": model_path,
            "revision": revision,
            "hf_cache_dir": hf_cache_dir,
            "hf_token": hf_token,
            "tp": tp,
            "compile_target": compile_target,
            "dtype": dtype,
            "weights_dtype": weights_dtype,
            "batch_sizes_prefill": tuple(batch_sizes_prefill or ()),
            "batch_sizes_decode": tuple(batch_sizes_decode or ()),
            "cache_dir": cache_dir,
            "cache_policy": cache_policy,
            "ensure": tuple(stage for stage, given in ensure.items() if given),
        },
        parts={
            "tokenizer_json": tokenizer_json,
            "model_config": model_config,
            "vmfb": vmfb,
            "parameters": tuple(map(Path, parameters or ())),
        },
    )
    _configure_logging(log_level, debug=debug)
    raise typer.Exit(
        _run(
            source,
            engine_settings,
            served_model_name=served_model_name,
            allow_dummy_weights=allow_dummy_weights,
            verify_digests=verify_digests,
            device=device,
            device_ids=None if not device_ids else tuple(device_ids),
            device_allocator=device_allocator,
            cpu_threads=cpu_threads,
            kv_cache_tokens=kv_cache_tokens,
            host=host,
            port=port,
            api_keys=keys,
            cors_allow_origins=tuple(cors_allow_origin or ()),
            max_concurrent_requests=max_concurrent_requests,
            request_timeout=request_timeout,
            shutdown_timeout=shutdown_timeout,
            debug=debug,
        )
    )


def _run(
    source: ModelSource,
    engine_settings: EngineSettings,
    *,
    served_model_name: str | None,
    allow_dummy_weights: bool,
    verify_digests: bool,
    device: str | None,
    device_ids: tuple[int, ...] | None,
    device_allocator: str,
    cpu_threads: int | None,
    kv_cache_tokens: int | None,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    cors_allow_origins: tuple[str, ...],
    max_concurrent_requests: int,
    request_timeout: float | None,
    shutdown_timeout: float,
    debug: bool,
) -> int:
    # Imported here, so that --help and a wrong flag answer at once; the device's side comes last.
    from shark_llm.server.lifecycle import Loaded, Report, bind, run_server

    sock = bind(host, port)
    try:
        from shark_llm.artifacts.bundle import Bundle, check_digests
        from shark_llm.runtime.devices import DeviceConfig
        from shark_llm.server.loading import start_engine

        def open_source(opened: Path | PartPaths) -> tuple[Bundle, DeviceConfig]:
            bundle = forms.open_source(opened)
            if bundle.manifest.weights == "dummy" and not allow_dummy_weights:
                raise ArtifactError(
                    f"{bundle.path} has dummy weights and would answer with noise; build it from a "
                    "checkpoint, or allow it for measuring with --allow-dummy-weights"
                )
            config = DeviceConfig(
                driver=device or bundle.manifest.target.driver,
                device_ids=device_ids,
                allocator=device_allocator,
                cpu_threads=cpu_threads,
            )
            return bundle, config

        there = None  # a bundle that is still to be built is opened by the loader
        if isinstance(source, ModelToBuild):
            source.check(device, device_ids)
            name = served_model_name or source.name
        else:
            there = open_source(source)
            name = served_model_name or there[0].manifest.source.name
    except BaseException:
        sock.close()
        raise

    def load(report: Report) -> Loaded:
        from shark_llm.runtime.module import load_runner

        if isinstance(source, ModelToBuild):
            bundle, config = open_source(source.build(report))
        else:
            assert there is not None
            bundle, config = there
        if verify_digests:
            report("verifying digests", 0.0)
            check_digests(
                bundle, lambda done, total: report("verifying digests", 100 * done / max(1, total))
            )
        report("loading the module and mapping its parameters")
        runner = load_runner(bundle, config, kv_cache_tokens, engine_settings.max_model_len)
        report("starting the engine")
        notes: list[str] = []
        loaded = start_engine(
            runner,
            engine_settings,
            directory=bundle.path,
            manifest=bundle.manifest,
            served_model_name=name,
            notes=notes,
        )
        for note in notes:
            logging.getLogger("shark_llm.server").warning(note)
        # All that is loaded stays: looking through it for garbage takes longer than a decode step.
        gc.collect()
        gc.freeze()
        return loaded

    settings = ServerSettings(
        host=host,
        port=port,
        served_model_name=name,
        api_keys=api_keys,
        cors_allow_origins=cors_allow_origins,
        max_concurrent_requests=max_concurrent_requests,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
        debug=debug,
    )
    try:
        return run_server(settings, load, sock)
    finally:
        # The bindings complain of each object of theirs that is left when the interpreter ends.
        gc.unfreeze()


def _api_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """The keys of the flag and of the file. No message shows one."""
    keys = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise UsageError(f"--api-key-file: cannot read {file}: {reason}") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise UsageError(f"--api-key-file: {file} has no key; write one on each line")
        keys += found
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise UsageError("an --api-key is empty, or not plain ASCII without spaces; choose another")
    return tuple(keys)


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
