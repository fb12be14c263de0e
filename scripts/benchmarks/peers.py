"""llama.cpp, built for this CPU in an environment of its own, and the model in its format.

Everything lies in .cache/bench. The source comes from the sdist of llama-cpp-python, which carries
llama.cpp; pip's own settings say from which index.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import model as demo_model  # scripts/model.py: fetches the model that everything here uses
from filelock import FileLock

from benchmarks.worker import Worker, environment
from shark_llm.artifacts.cpu import host_cpu_features
from shark_llm.artifacts.manifest import Manifest
from shark_llm.errors import UsageError

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "bench"
LLAMA_CPP_PYTHON = "0.3.36"
CMAKE_FLAGS = ("-DGGML_NATIVE=ON", "-DCMAKE_BUILD_TYPE=Release", "-DLLAVA_BUILD=OFF")
ENVIRONMENT = CACHE / "llama.cpp"
PYTHON = ENVIRONMENT / "bin" / "python"
SERVER = ENVIRONMENT / "bin" / "llama-server"
TRIAD_FLAGS = ("-O3", "-march=native", "-ffast-math", "-shared", "-fPIC")


class PeerError(Exception):
    """A peer could not be built; the message names the log or the remedy."""


def llama_cpp() -> Path:
    """The Python that has llama-cpp-python; the first call builds its environment (minutes)."""
    made_from = "\n".join([LLAMA_CPP_PYTHON, *CMAKE_FLAGS, *sorted(host_cpu_features())])
    stamp = ENVIRONMENT / "stamp"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "llama.cpp.lock"):
        if not (stamp.exists() and stamp.read_text() == made_from):
            _install_llama_cpp()
            stamp.write_text(made_from)
    return PYTHON


def _install_llama_cpp() -> None:
    print(f"bench: building llama-cpp-python {LLAMA_CPP_PYTHON} for this CPU (minutes)", flush=True)
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    log = CACHE / "llama.cpp.log"
    log.write_bytes(b"")
    run([sys.executable, "-m", "venv", str(ENVIRONMENT)], log)
    install = [str(PYTHON), "-m", "pip", "install", "--no-input", "--no-cache-dir"]
    install += ["--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_CPP_PYTHON}"]
    run(install, log, CMAKE_ARGS=" ".join(CMAKE_FLAGS))


def llama_server() -> Path:
    """The llama-server of the same source and flags; built by the first call (minutes)."""
    llama_cpp()
    with FileLock(CACHE / "llama.cpp.lock"):
        if not SERVER.exists():
            _build_llama_server()
    return SERVER


def _build_llama_server() -> None:
    print("bench: building llama-server from the same source (minutes)", flush=True)
    log, room = CACHE / "llama-server.log", ENVIRONMENT / "source"
    log.write_bytes(b"")
    shutil.rmtree(room, ignore_errors=True)
    download = [str(PYTHON), "-m", "pip", "download", "--no-input", "--no-deps"]
    download += ["--no-binary", ":all:", f"llama-cpp-python=={LLAMA_CPP_PYTHON}"]
    download += ["--dest", str(room)]
    run(download, log)
    (sdist,) = room.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        unpack(archive, room)
    (source,) = room.glob("*/vendor/llama.cpp")
    build = room / "build"
    static = ["-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"]
    static += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
    run(["cmake", "-S", str(source), "-B", str(build), *CMAKE_FLAGS, *static], log)
    jobs = str(len(os.sched_getaffinity(0)))
    run(["cmake", "--build", str(build), "--target", "llama-server", "--parallel", jobs], log)
    shutil.copy2(build / "bin" / "llama-server", SERVER)
    shutil.rmtree(room)


def gguf(dtype: str) -> Path:
    """The model with matrices in `dtype`, as GGUF; made from the published Q4_1 by llama.cpp."""
    demo_model.fetch()
    path = CACHE / "gguf" / f"{demo_model.MODEL.stem.removesuffix('.Q4_1')}.{dtype}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        cpus = sorted(os.sched_getaffinity(0))
        with Worker("llama_worker", python=llama_cpp(), cpus=cpus) as worker:
            worker.call("convert", source=str(demo_model.MODEL), destination=str(path), dtype=dtype)
    return path


def triad_library() -> Path:
    """The compiled kernels of triad.c."""
    source = Path(__file__).with_name("triad.c")
    made_from = (
        source.read_bytes() + "\n".join([*TRIAD_FLAGS, *sorted(host_cpu_features())]).encode()
    )
    library = CACHE / f"triad-{hashlib.sha256(made_from).hexdigest()[:12]}.so"
    if not library.exists():
        compiler = shutil.which("cc")
        if compiler is None:
            raise PeerError("no C compiler (cc) for the memory bandwidth's kernel: install one")
        library.parent.mkdir(parents=True, exist_ok=True)
        staged = library.with_suffix(".part")
        run([compiler, *TRIAD_FLAGS, str(source), "-o", str(staged)], CACHE / "triad.log")
        staged.replace(library)
    return library


DECODE_BATCHES = (1, 2, 4, 8, 16, 32)
"""Of the bundle that is measured: more than shark-compile makes without being asked."""


def bundle(dtype: str) -> Path:
    """Our bundle of the same model; shark-compile itself finds what it can reuse."""
    demo_model.fetch()
    path = CACHE / "bundles" / dtype
    print(f"bench: shark-compile --dtype {dtype}", flush=True)
    compile_bundle(bench_command(dtype, path, CACHE / "dev" / dtype))
    return path


def bench_command(dtype: str, bundle_dir: Path, dev_dir: Path) -> list[str]:
    """`compile_command`, for all batches that are measured."""
    command = compile_command(dtype, bundle_dir, dev_dir)
    return [*command, "--batch-sizes-decode", *map(str, DECODE_BATCHES)]


def compile_bundle(command: list[str], *, paths: Sequence[Path] = ()) -> None:
    """Run shark-compile; modules are looked for in `paths` before those that are installed."""
    code = subprocess.run(command, cwd=ROOT, env=environment(paths)).returncode
    if code != 0:
        raise PeerError(f"shark-compile ended with exit code {code}; its message is above")


def compile_command(dtype: str, bundle_dir: Path, dev_dir: Path) -> list[str]:
    """shark-compile for this CPU, with the entry points that it makes without being asked."""
    command = [str(Path(sys.executable).with_name("shark-compile")), "--compile-target", "host"]
    command += ["--hf-model", str(demo_model.MODEL)]
    # Forced, for the published file is quantized: so is what llama.cpp makes q8_0 of.
    int8 = ["--dtype", "bf16", "--weights-dtype", "int8", "--force"]
    command += int8 if dtype == "int8" else ["--dtype", dtype]
    command += ["--output-artifacts-dir", str(bundle_dir)]
    return [*command, "--output-dev-artifacts-dir", str(dev_dir)]


def check_dtype(manifest: Manifest, asked: str) -> None:
    """Raises UsageError when a bundle given by hand is not of the precision to compare at."""
    bundle_dtype = manifest.weights_dtype or manifest.dtype
    if bundle_dtype != asked:
        raise UsageError(f"the bundle is in {bundle_dtype}, --dtype is {asked}: they must be equal")


def unpack(archive: tarfile.TarFile, room: Path) -> None:
    """Into `room`, and nowhere else: with the filter for data where Python has it (3.11.4)."""
    if hasattr(tarfile, "data_filter"):
        archive.extraction_filter = tarfile.data_filter
    archive.extractall(room)


def run(command: list[str], log: Path, **variables: str) -> None:
    with log.open("ab") as output:
        code = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables}
        ).returncode
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()[-15:]
        shown = log.relative_to(ROOT)
        raise PeerError("\n".join([*lines, f"{command[0]} failed ({code}); the log is {shown}"]))
