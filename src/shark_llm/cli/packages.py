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


IREE_PACKAGES = ("iree-base-compiler", "iree-base-runtime")
"""Of one major.minor, or what the one makes the other does not load."""


def version_line(program: str) -> str:
    """This package and what it compiles with, on one line; and whether it does not fit together."""
    packages = (*IREE_PACKAGES, "torch")
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    line = f"{program} {__version__} ({', '.join(found)})"
    misfit = _iree_misfit()
    return line if misfit is None else f"{line}: {misfit}"


def _iree_misfit() -> str | None:
    """What is wrong with the two halves of IREE that are installed; None: nothing."""
    try:
        compiler, runtime = (importlib.metadata.version(package) for package in IREE_PACKAGES)
    except importlib.metadata.PackageNotFoundError:
        return None
    if compiler.split(".")[:2] == runtime.split(".")[:2]:
        return None
    return (
        f"iree-base-compiler {compiler} and iree-base-runtime {runtime} do not fit together: "
        "install both in one version (pip install 'shark-llm[compile]')"
    )


def require_compile_packages() -> None:
    """Raise CompileError with the remedy unless what building needs is installed, and fits."""
    missing = [name for name, module in COMPILE_PACKAGES.items() if not is_installed(module)]
    if missing:
        raise CompileError(
            f"building needs {', '.join(missing)}, not installed here: "
            "pip install 'shark-llm[compile]'"
        )
    if (misfit := _iree_misfit()) is not None:
        raise CompileError(misfit)


def is_installed(module: str) -> bool:
    """Whether the module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False
