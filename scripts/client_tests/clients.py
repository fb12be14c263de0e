"""Each client: how it is called, and what shows that it got what it wanted.

All of them run from the checkout's root, offline but for this machine, and must end with code 0.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model as demo_model  # scripts/model.py: fetches the model that everything here uses
import torch

from client_tests.environments import CACHE, ROOT, python_of
from shark_llm.checkpoint.export_hf import export_hf
from shark_llm.checkpoint.open import open_checkpoint

TIMEOUT = 900.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
TASK = ROOT / "scripts" / "client_tests" / "task"


class ClientError(Exception):
    """A client failed, or did not get what it asked for."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The server that the clients are pointed at."""

    url: str
    """Without /v1."""
    model: str
    bundle: Path
    """It has the tokenizer that some clients load themselves."""


def openai(served: Served) -> str:
    """Sync and async, streams, n, logprobs, errors: see openai_client."""
    program = ROOT / "scripts" / "client_tests" / "openai_client.py"
    return _run([str(python_of("openai")), str(program), f"{served.url}/v1"]).strip()


def curl(served: Served) -> str:
    """One stream, as it stands in the docs."""
    body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "stream": True}
    command = ["curl", "--no-buffer", "--silent", "--show-error", "--fail-with-body"]
    command += [f"{served.url}/v1/completions", "-H", "Content-Type: application/json"]
    lines = _run([*command, "-d", json.dumps(body)]).split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line.strip()]
    if events[-1] != "[DONE]":
        raise ClientError(f"the stream ends with {events[-1]!r}")
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    return f"{len(events) - 1} events: {text!r}"


def llama_benchy(served: Served) -> str:
    """Prompts of 128 and 16 tokens after them, one and four at a time."""
    with _book() as book, tempfile.TemporaryDirectory() as room:
        result = Path(room) / "result.json"
        command = [_program("llama-benchy"), "--base-url", f"{served.url}/v1"]
        command += ["--model", served.model, "--tokenizer", str(served.bundle)]
        command += ["--book-url", book, "--pp", "128", "--tg", "16", "--runs", "1"]
        command += ["--concurrency", "1", "4", "--exact-tg", "--exit-on-first-fail"]
        command += ["--format", "json", "--save-result", str(result), "--skip-coherence"]
        _run(command)
        found = json.loads(result.read_text())
    return f"{len(found['benchmarks'])} measurements"


def guidellm(served: Served) -> str:
    """Eight requests of 64 + 16 tokens, four at a time."""
    with tempfile.TemporaryDirectory() as room:
        result = Path(room) / "result.json"
        command = [_program("guidellm"), "run", "--disable-console-interactive"]
        command += ["--backend", f"kind=openai_http,target={served.url},model={served.model}"]
        command += ["--profile", "kind=concurrent,streams=4"]
        command += ["--constraint", "kind=max_requests,count=8"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={served.bundle}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
        command += ["--output", f"kind=json,path={result}"]
        _run(command)
        (benchmark,) = json.loads(result.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if totals["errored"] or totals["successful"] != 8:
        raise ClientError(f"of 8 requests {totals}")
    return f"{totals['successful']} requests"


def aiperf(served: Served) -> str:
    """Eight streamed requests of 64 + 16 tokens, four at a time."""
    with tempfile.TemporaryDirectory() as room:
        command = [_program("aiperf"), "profile", "--model", served.model, "--url", served.url]
        command += ["--endpoint-type", "completions", "--streaming", "--ui", "none"]
        command += ["--tokenizer", str(served.bundle), "--concurrency", "4"]
        command += ["--request-count", "8", "--synthetic-input-tokens-mean", "64"]
        command += ["--output-tokens-mean", "16", "--artifact-dir", room]
        _run(command, offline=False)  # offline, it takes no directory for a tokenizer
        (report,) = Path(room).rglob("profile_export_aiperf.json")
        found = json.loads(report.read_text())
    if found.get("error_request_count") or found["request_count"]["avg"] != 8:
        raise ClientError(f"of 8 requests {found['request_count']}")
    return f"{found['request_count']['avg']:.0f} requests"


def lm_eval(served: Served) -> str:
    """A local task of multiple choice: the score over HTTP is the one that transformers gives."""
    checkpoint = CACHE / "checkpoint"
    if not (checkpoint / "config.json").exists():
        demo_model.fetch()
        export_hf(open_checkpoint(demo_model.MODEL), checkpoint, dtype=torch.bfloat16)
    reference = _scores("hf", f"pretrained={checkpoint},dtype=float32", "--device", "cpu")
    found = _scores(
        "local-completions",
        f"model={served.model},base_url={served.url}/v1/completions,tokenizer={served.bundle},"
        "tokenizer_backend=huggingface,num_concurrent=4,max_retries=1",
    )
    if found != reference:
        raise ClientError(f"scores {found}; transformers gives {reference}")
    return f"the same scores as transformers: {found}"


CLIENTS: Mapping[str, Callable[[Served], str]] = {
    "openai": openai,
    "curl": curl,
    "llama-benchy": llama_benchy,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "lm_eval": lm_eval,
}


def _scores(model: str, arguments: str, *more: str) -> dict[str, float]:
    """acc and acc_norm of the task."""
    with tempfile.TemporaryDirectory() as room:
        command = [_program("lm_eval"), "run", "--model", model, "--model_args", arguments]
        command += ["--tasks", "facts", "--include_path", str(TASK), "--batch_size", "1"]
        command += ["--output_path", room, *more]
        _run(command)
        (report,) = Path(room).rglob("results_*.json")
        found = json.loads(report.read_text())["results"]["facts"]
    return {name: found[f"{name},none"] for name in ("acc", "acc_norm")}


def _program(client: str) -> str:
    return str(python_of(client).with_name(client))


def _run(command: Sequence[str], *, offline: bool = True) -> str:
    """The standard output of a client. `offline` tells it not to ask the hub for anything."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", *OFFLINE)}
    environment |= OFFLINE if offline else {}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise ClientError(f"{shlex.join(command)} ran longer than {TIMEOUT:.0f} s") from None
    if done.returncode:
        print(done.stdout[-3000:] + done.stderr[-3000:], file=sys.stderr)
        raise ClientError(f"{shlex.join(command)} ended with exit code {done.returncode}")
    return done.stdout


@contextmanager
def _book() -> Iterator[str]:
    """The address of a long text: llama-benchy cuts its prompts from a book that it downloads."""
    with tempfile.TemporaryDirectory() as room:
        text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        (Path(room) / "book.txt").write_text(text)
        handler = functools.partial(_Quiet, directory=room)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/book.txt"
            finally:
                server.shutdown()
                thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""
