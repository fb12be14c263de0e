"""From a checkpoint to answered requests with the real commands: compile, verify, serve, ask, stop.

One tiny f32 model is compiled once, with all that --save-intermediates adds; everything else reuses
its bundle.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

import tiny
from shark_llm.artifacts.manifest import digest_files, read_manifest

BIN = Path(sys.executable).parent
PROMPT = "the cat sat on the"


def run(command: str, *argv: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    words = [str(BIN / command), *map(str, argv)]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=cwd)


class Built:
    """The checkpoint, its bundle and dev artifacts, and how they were asked for."""

    def __init__(self, root: Path) -> None:
        config = tiny.tiny_config(num_hidden_layers=1)
        self.model = tiny.write_tiny(root / "tiny", config=config)
        self.bundle, self.dev = root / "bundle", root / "dev"
        self.argv = ["--hf-model", self.model, "--output-artifacts-dir", self.bundle]
        self.argv += ["--output-dev-artifacts-dir", self.dev, "--save-intermediates"]
        self.argv += ["--batch_sizes_prefill", "1", "--batch_sizes_decode", "1", "2"]
        self.first = run("shark-compile", *self.argv)
        assert self.first.returncode == 0, self.first.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def server(built: Built) -> Iterator[str]:
    """The address of a server of the bundle as it was built."""
    with serving(built.bundle.parent / "serve.log", "--artifacts-dir", built.bundle) as url:
        yield url


@contextmanager
def serving(log: Path, *argv: object) -> Iterator[str]:
    """The address of a shark-serve process; it must end with 0 on SIGTERM."""
    command = [BIN / "shark-compile", "serve", *map(str, argv), "--port", "0"]
    command += ["--device-ids", "0"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield _ready(process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert "Traceback" not in log.read_text()


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://[\w.]+:\d+", log.read_text())
        if found:
            try:
                if httpx.get(f"{found[0]}/health").status_code == 200:
                    return found[0]
            except httpx.TransportError:
                pass  # not listening yet
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def greedy_ids(model_dir: Path, ids: list[int], count: int) -> list[int]:
    """What transformers continues with, greedily."""
    model = transformers.LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    new: list[int] = out[0, len(ids) :].tolist()
    return new


def test_greedy_completion_equals_transformers(built: Built, server: str) -> None:
    """Token for token over HTTP, across a page boundary."""
    tokenizer = tiny.tiny_tokenizer()
    ids = tokenizer.encode(PROMPT).ids
    wanted = greedy_ids(built.model, ids, 24)
    stopped = 2 in wanted
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    answer: dict[str, Any] = httpx.post(f"{server}/v1/completions", json=body, timeout=60).json()
    choice = answer["choices"][0]
    assert choice["text"] == tokenizer.decode([i for i in wanted if i != 2])
    assert choice["finish_reason"] == ("stop" if stopped else "length")
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == len(wanted)
    assert answer["model"] == "tiny"


def test_chat_and_streaming(server: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    whole = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60).json()
    text = whole["choices"][0]["message"]["content"]
    streamed = ""
    with httpx.stream(
        "POST", f"{server}/v1/chat/completions", json={**body, "stream": True}, timeout=60
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        streamed += json.loads(line)["choices"][0]["delta"].get("content") or ""
    assert streamed == text
    assert whole["usage"]["completion_tokens"] > 0


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_size, p.stat().st_mtime_ns) for p in directory.iterdir()}


def move(bundle: Path, target: Path, how: str) -> Path:
    """The bundle in another place."""
    if how == "cp":
        subprocess.run(["cp", "-r", bundle, target], check=True)
    elif how == "tar":  # as rsync -a: times and modes are kept, files arrive one by one
        target.mkdir()
        subprocess.run(f"tar -C {bundle} -c . | tar -C {target} -xp", shell=True, check=True)
    elif how == "rsync":
        if shutil.which("rsync") is None:
            pytest.skip("rsync is not installed")
        subprocess.run(["rsync", "-a", f"{bundle}/", target], check=True)
    elif how == "read-only":
        shutil.copytree(bundle, target)
        for path in (*target.iterdir(), target):
            path.chmod(path.stat().st_mode & ~0o222)
    elif how == "link":
        target.symlink_to(bundle)
    elif how == "links to files":
        target.mkdir()
        for path in bundle.iterdir():
            (target / path.name).symlink_to(path)
    return target


@pytest.mark.parametrize("how", ["cp", "tar", "rsync", "read-only", "link", "links to files"])
def test_a_moved_bundle_serves(built: Built, server: str, tmp_path: Path, how: str) -> None:
    """Wherever it lies, and it is not written to; every byte is checked before it is loaded."""
    moved = move(built.bundle, tmp_path / "moved", how)
    before = listing(moved)
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    wanted = httpx.post(f"{server}/v1/completions", json=body, timeout=60).json()["choices"]
    with serving(tmp_path / "log", "--artifacts-dir", moved, "--verify-digests") as url:
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert found == wanted
    assert listing(moved) == before


def test_a_damaged_copy_is_not_served(built: Built, tmp_path: Path) -> None:
    """One bit of a weight: sizes alone would serve it."""
    moved = move(built.bundle, tmp_path / "moved", "cp")
    archive = bytearray((moved / "model.irpa").read_bytes())
    archive[-5000] ^= 1
    (moved / "model.irpa").write_bytes(archive)
    argv = ["--artifacts-dir", moved, "--port", "0", "--verify-digests"]
    result = run("shark-serve", *argv)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("shark-serve: error: the bundle")
    assert "damaged: model.irpa has sha256" in last


def test_a_bundle_taken_apart_serves(built: Built, server: str, tmp_path: Path) -> None:
    """The older stack's command line, on this project's own files."""
    big = tmp_path / "big"
    big.mkdir()
    small = Path(shutil.copytree(built.bundle, tmp_path / "small"))
    vmfb = (small / "model.vmfb").rename(big / "llama.vmfb")
    irpa = (small / "model.irpa").rename(big / "llama_tp1.irpa")
    config = (small / "manifest.json").rename(big / "served.json")
    argv = ["--tokenizer_json", small / "tokenizer.json", "--model_config", config]
    argv += ["--vmfb", vmfb, "--parameters", irpa, "--device=local-task"]
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    wanted = httpx.post(f"{server}/v1/completions", json=body, timeout=60).json()["choices"]
    with serving(tmp_path / "log", *argv) as url:
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert found == wanted


def test_the_second_run_is_reused(built: Built) -> None:
    """Nothing is exported or compiled; a file that was not written again says so too."""
    before = (built.bundle / "manifest.json").stat().st_mtime_ns
    again = run("shark-compile", *built.argv)
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stdout
    assert "export" not in again.stdout
    assert (built.bundle / "manifest.json").stat().st_mtime_ns == before


def test_verify_runs_the_golden_check_from_the_archives(built: Built) -> None:
    result = run("shark-compile", "verify", built.bundle)
    assert result.returncode == 0, result.stdout + result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "golden check" in line]
    assert line.startswith("ok ")
    assert "largest error" in line


def test_the_golden_check_finds_a_module_of_another_model(built: Built, tmp_path: Path) -> None:
    """All files are as listed; only the computation tells that the norms have another epsilon."""
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", built.bundle, copy], check=True)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["config"]["rms_norm_eps"] = 0.5
    (copy / "manifest.json").write_text(json.dumps(manifest))
    result = run("shark-compile", "verify", copy, "--json")
    assert result.returncode == 1
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["golden check"]["status"] == "FAILED"
    assert "logits differ by" in checks["golden check"]["detail"]


def test_intermediates(built: Built) -> None:
    phases = {path.name.split(".")[2] for path in (built.dev / "phases").iterdir()}
    assert {"input", "flow", "stream"} <= phases
    assert any((built.dev / "executable-sources").glob("*.mlir"))
    assert any((built.dev / "executable-benchmarks").glob("*_benchmark.mlir"))


def test_the_compile_command_gives_the_same_module(built: Built, tmp_path: Path) -> None:
    """From another working directory; the compiler is deterministic."""
    env = {"PATH": f"{BIN}:/usr/bin:/bin"}
    script = built.dev / "compile-command.sh"
    subprocess.run([script], cwd=tmp_path, env=env, check=True, timeout=600)
    wanted = read_manifest(built.bundle / "manifest.json").files["model.vmfb"]
    assert digest_files(tmp_path, ["model.vmfb"])["model.vmfb"] == wanted


@pytest.mark.parametrize("name", ["benchmark-flags", "benchmark-flags/prefill_bs1"])
def test_the_flagfiles_run_as_they_stand(built: Built, tmp_path: Path, name: str) -> None:
    flagfile = f"--flagfile={built.dev / name}.txt"
    result = run("iree-benchmark-module", flagfile, "--benchmark_min_time=1x", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"BM_(decode|prefill)_bs1", result.stdout), result.stdout


def test_a_flag_that_the_compiler_refuses(built: Built) -> None:
    """The old bundle stays, and the server could go on with it; the source is kept aside."""
    before = read_manifest(built.bundle / "manifest.json")
    result = run("shark-compile", *built.argv, "--extra-compile-arg=--no-such-flag")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("shark-compile: error: iree-compile failed with exit code 1")
    assert "--no-such-flag" in line
    assert f"kept in {built.dev}.failed" in line
    assert read_manifest(built.bundle / "manifest.json") == before
    assert digest_files(built.bundle, before.files) == before.files
    names = {path.name for path in built.bundle.parent.iterdir()}
    assert names <= {"tiny", "bundle", "dev", "dev.failed", "serve.log"}
