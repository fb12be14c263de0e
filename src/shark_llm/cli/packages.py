"""What is installed of the compile side: an installation for serving does without it."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from shark_llm import __version__
from shark_llm.errors import CompileError

COMPILE_PACKAGES = {
    "torch": "torch",
    "iree-base-compiler": "iree.compiler",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "huggingface_hub": "huggingface_hub",
}
"""What the extra `compile` installs: distribution -> the module that it brings."""


def version_line(program: str) -> str:
    """This package and what it compiles with, on one line."""
    packages = ("iree-base-compiler", "iree-base-runtime", "torch")
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return f"{program} {__version__} ({', '.join(found)})"


def require_compile_packages() -> None:
    """Raise CompileError with the remedy unless everything that building needs is installed."""
    missing = [name for name, module in COMPILE_PACKAGES.items() if not is_installed(module)]
    if missing:
        raise CompileError(
            f"building needs {', '.join(missing)}, not installed here: "
            "pip install 'shark-llm[compile]'"
        )


def is_installed(module: str) -> bool:
    """Whether the module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False
