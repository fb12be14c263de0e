"""The demo's own steps, run by scripts/demo in the project's environment.

Fetch the model, compile it, serve it, ask one question over HTTP with streaming, stop the server.
Everything it makes lies in .cache/models and .shark-demo, both ignored by git.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import model as demo_model

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
WORK = ROOT / ".shark-demo"
BUNDLE = WORK / "bundle"
DEV = WORK / "dev"
SERVER_LOG = WORK / "serve.log"
QUESTION = "Why is the sky blue? Answer in a few sentences."
READY_TIMEOUT = 120.0
STOP_TIMEOUT = 30.0


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def shown(path: Path) -> str:
    """A path as the user would type it from the checkout."""
    return path.relative_to(ROOT).as_posix()


# --- the steps -----------------------------------------------------------------------------------


def fetch() -> None:
    fetched = demo_model.fetch()
    say(f"model: {'fetched' if fetched else 'reusing'} {shown(demo_model.MODEL)}")


def compile_bundle() -> None:
    """Compile; shark-compile itself finds what an earlier run has made already."""
    manifest = BUNDLE / "manifest.json"
    before = manifest.stat().st_mtime_ns if manifest.exists() else None
    say("compile: SmolLM2-135M-Instruct for this CPU")
    command = ["shark-compile", "--hf-model", shown(demo_model.MODEL), "--compile-target", "host"]
    command += ["--output-artifacts-dir", shown(BUNDLE), "--output-dev-artifacts-dir", shown(DEV)]
    print("  $ " + " ".join(command), flush=True)
    started = time.monotonic()
    code = subprocess.run([BIN / command[0], *command[1:]], cwd=ROOT).returncode
    if code != 0:
        raise SystemExit(f"demo: shark-compile failed with exit code {code}; its message is above")
    reused = manifest.stat().st_mtime_ns == before
    took = f"done in {time.monotonic() - started:.0f} s"
    say(f"compile: {f'reusing the bundle in {shown(BUNDLE)}' if reused else took}")


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """Run shark-serve on a free port: yields (host, port) once ready, then stops it by SIGTERM."""
    command = ["shark-serve", "--artifacts-dir", shown(BUNDLE), "--port", "0"]
    print("  $ " + " ".join(command), flush=True)
    started = time.monotonic()
    with SERVER_LOG.open("w") as log:
        server = subprocess.Popen(
            [BIN / command[0], *command[1:]], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        host, port = _wait_until_ready(server)
        say(f"serve: ready on http://{host}:{port} after {time.monotonic() - started:.1f} s")
        yield host, port
        server.send_signal(signal.SIGTERM)
        code = server.wait(STOP_TIMEOUT)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    if code != 0:
        raise SystemExit(f"demo: the server ended with exit code {code}; see {shown(SERVER_LOG)}")
    say("serve: stopped on SIGTERM, exit code 0")


def _wait_until_ready(server: subprocess.Popen[bytes]) -> tuple[str, int]:
    """Find the address in the server's log, then poll /health until it says 200."""
    deadline = time.monotonic() + READY_TIMEOUT
    while time.monotonic() < deadline:
        if server.poll() is not None:
            print(SERVER_LOG.read_text(), end="")
            raise SystemExit(f"demo: the server ended with exit code {server.returncode}")
        address = re.search(r"http://([\w.]+):(\d+)", SERVER_LOG.read_text())
        if address:
            host, port = address[1], int(address[2])
            connection = http.client.HTTPConnection(host, port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return host, port
            except OSError:
                pass  # not listening yet
            finally:
                connection.close()
        time.sleep(0.1)
    raise SystemExit(f"demo: not ready after {READY_TIMEOUT:.0f} s; see {shown(SERVER_LOG)}")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Times are seconds since the request was sent."""

    tokens: int
    first_token: float
    last_token: float


def ask(host: str, port: int, question: str) -> Answer:
    """Send a chat request with streaming and print the answer as it comes."""
    body = {
        "model": _served_model(host, port),
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 128,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(host, port, timeout=120)
    started = time.monotonic()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"demo: HTTP {response.status}: {response.read().decode()}")
    times: list[float] = []
    tokens = 0
    print(f"\n  Q: {question}\n  A: ", end="", flush=True)
    for line in response:
        data = line.decode().removeprefix("data:").strip()
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise SystemExit(f"demo: the server broke off: {event['error']['message']}")
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            text = choice["delta"].get("content")
            if text:
                times.append(time.monotonic() - started)
                print(text.replace("\n", "\n     "), end="", flush=True)
    connection.close()
    print("\n", flush=True)
    if not times:
        raise SystemExit("demo: the answer was empty")
    return Answer(tokens=tokens, first_token=times[0], last_token=times[-1])


def _served_model(host: str, port: int) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("GET", "/v1/models")
    models = json.loads(connection.getresponse().read())
    connection.close()
    return str(models["data"][0]["id"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--question", default=QUESTION, help="what to ask the model")
    question = parser.parse_args().question
    started = time.monotonic()
    WORK.mkdir(exist_ok=True)
    fetch()
    compile_bundle()
    with serving() as (host, port):
        answer = ask(host, port, question)
        say(f"answer: first token after {answer.first_token * 1e3:.0f} ms")
        if answer.tokens > 1:
            rate = (answer.tokens - 1) / (answer.last_token - answer.first_token)
            say(f"answer: {answer.tokens} tokens, {rate:.0f} tokens/s after the first")
    print(
        f"\nThe bundle lies in {shown(BUNDLE)}, what a compiler engineer needs in {shown(DEV)}.\n"
        f"  serve it:     .venv/bin/shark-serve --artifacts-dir {shown(BUNDLE)}\n"
        f"  benchmark it: .venv/bin/iree-benchmark-module"
        f" --flagfile={shown(DEV)}/benchmark-flags.txt"
    )
    say(f"all steps done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
