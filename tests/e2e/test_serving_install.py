"""The base install is enough to serve: no torch, no compiler, no checkpoint reader.

A virtual environment is filled with exactly the packages that the base install of shark-llm asks
for, and theirs, by links to the files of this environment: what pip would install, with no network.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import shark_llm

RUN_COMMAND = """
import sys
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name=sys.argv[1])
sys.argv = sys.argv[1:]
sys.exit(command.load()())
"""


def base_install(name: str) -> dict[str, Distribution]:
    """The distributions that `pip install name` brings, without extras that nothing asks for."""
    found: dict[str, Distribution] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    seen = set()
    while waiting:
        key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        dist = distribution(key[0])
        found[dist.name.lower()] = dist
        for line in dist.requires or ():
            wanted = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *key[1])]
            if wanted.marker is None or any(map(wanted.marker.evaluate, environments)):
                waiting.append((wanted.name, frozenset(wanted.extras)))
    return found


@pytest.fixture(scope="module")
def serving_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the base install only."""
    room = tmp_path_factory.mktemp("serving")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", room], check=True)
    python = room / "bin" / "python"
    scheme = sysconfig.get_paths(vars={"base": str(room), "platbase": str(room)})
    site = Path(scheme["purelib"])
    for dist in base_install("shark-llm").values():
        for file in dist.files or ():
            # Not the scripts, and not the link file of an editable install, which leads to src/.
            if ".." in file.parts or file.suffix == ".pth":
                continue
            link = site / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(str(dist.locate_file(file))))
    (site / "shark_llm").symlink_to(Path(shark_llm.__file__).parent)
    return python


def run(python: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-I", "-c", *args], capture_output=True, text=True, timeout=120)


# huggingface_hub is not in the list: tokenizers brings it. tests/unit/test_islands.py shows that
# serving does not import it.
@pytest.mark.parametrize(
    "package", ["torch", "transformers", "safetensors", "gguf", "iree.compiler"]
)
def test_the_compile_side_is_not_there(serving_python: Path, package: str) -> None:
    result = run(serving_python, f"import {package}")
    assert result.returncode == 1
    assert "ModuleNotFoundError" in result.stderr


def test_serve_says_its_version(serving_python: Path) -> None:
    result = run(serving_python, RUN_COMMAND, "shark-serve", "--version")
    assert result.returncode == 0, result.stderr
    assert shark_llm.__version__ in result.stdout


def test_serve_says_its_flags(serving_python: Path) -> None:
    result = run(serving_python, RUN_COMMAND, "shark-serve", "--help")
    assert result.returncode == 0, result.stderr
    assert "--artifacts-dir" in result.stdout


def test_serve_refuses_a_missing_bundle(serving_python: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing-here")
    result = run(serving_python, RUN_COMMAND, "shark-serve", "--artifacts-dir", missing)
    assert result.returncode == 1
    assert missing in result.stderr
    assert "Traceback" not in result.stderr


def test_compile_names_the_extra_to_install(serving_python: Path, tmp_path: Path) -> None:
    arguments = ["--hf-model", str(tmp_path), "--compile-target", "host"]
    arguments += ["--output-artifacts-dir", str(tmp_path / "bundle")]
    result = run(serving_python, RUN_COMMAND, "shark-compile", *arguments)
    assert result.returncode != 0
    assert "shark-llm[compile]" in result.stderr
    assert "Traceback" not in result.stderr
