"""The serving side works where the compile side is not installed.

The import contracts in pyproject.toml say the same statically; here the modules are really
imported, in a process in which the compile side's packages cannot be.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shark_llm

PACKAGE = Path(shark_llm.__file__).parent
SERVING = ("artifacts", "engine", "runtime", "server")
COMPILE_ONLY = ("torch", "transformers", "safetensors", "gguf", "huggingface_hub", "iree.compiler")

# Imports everything named on the command line while every package of COMPILE_ONLY is forbidden,
# then shows which of them are loaded nevertheless.
PROBE = """
import importlib, sys
forbidden = tuple(sys.argv[1].split(","))

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == root or name.startswith(root + ".") for root in forbidden):
            raise ImportError(f"{name} is not for the serving side")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[2:]:
    importlib.import_module(name)
print(sorted(root for root in forbidden if root in sys.modules))
"""


def serving_modules() -> list[str]:
    """The dotted names of every module of the serving side, the command included."""
    files = [path for folder in SERVING for path in sorted((PACKAGE / folder).rglob("*.py"))]
    files.append(PACKAGE / "cli" / "serve.py")
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files]
    return [name.removesuffix(".__init__") for name in names]


def probe(*modules: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE, ",".join(COMPILE_ONLY), *modules],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_serving_imports_without_the_compile_side() -> None:
    result = probe(*serving_modules())
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_the_probe_notices_a_forbidden_import() -> None:
    result = probe("shark_llm.model.llama")
    assert result.returncode == 1
    assert "torch is not for the serving side" in result.stderr


@pytest.mark.parametrize("folder", SERVING)
def test_serving_never_names_the_compiler(folder: str) -> None:
    """import-linter sees `iree` as one package, so the compiler's half is looked for here."""
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found = [name for name in names if name.startswith("iree.compiler")]
            assert not found, f"{path}:{node.lineno} imports {found}"
