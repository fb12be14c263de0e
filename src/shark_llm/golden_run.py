"""Where the golden check can run, and running it on a bundle. Imports torch only when it does."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shark_llm.artifacts.bundle import Bundle
from shark_llm.artifacts.cpu import missing_cpu_features
from shark_llm.artifacts.irpa import ArchiveReader, archive_ranks
from shark_llm.artifacts.manifest import GoldenReport, Manifest

if TYPE_CHECKING:
    import torch

    from shark_llm.export.packed import LinearForm
    from shark_llm.model.config import ModelConfig

# The weights twice, as the module's and the eager model's own, and what both compute.
_WEIGHT_COPIES = 2
_WORKSPACE_BYTES = 512 << 20


def why_not_here(manifest: Manifest, weight_bytes: int) -> str | None:
    """Why the golden check of such a bundle cannot run on this machine; None: it can.

    `weight_bytes` is the size of all archives together.
    """
    target = manifest.target
    if manifest.weights == "dummy":
        return "the weights are dummies"
    if target.driver != "local-task":
        return f"{target.name} does not run on this machine"
    if missing := missing_cpu_features(target.cpu_features):
        return f"this CPU lacks {' '.join(missing)}"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install 'shark-llm[compile]')"
    needed = _WEIGHT_COPIES * weight_bytes + _WORKSPACE_BYTES
    free = available_memory()
    if free is not None and needed > free:
        return f"it needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
    return None


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping; None where the kernel does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def run_golden(
    bundle: Bundle,
    config: ModelConfig,
    parameters: Mapping[str, torch.Tensor],
    *,
    form: LinearForm,
) -> GoldenReport:
    """Load the bundle as the server will and compare it with the eager model of `parameters`.

    Raises VerificationError when they differ.
    """
    from shark_llm.golden import check_golden, golden_pages
    from shark_llm.runtime.devices import DeviceConfig
    from shark_llm.runtime.module import load_runner

    manifest = bundle.manifest
    tokens = (golden_pages(manifest) - 1) * manifest.page_size
    runner = load_runner(bundle, DeviceConfig(driver="local-task"), tokens)
    try:
        return check_golden(runner, manifest, config, parameters, form=form)
    finally:
        runner.close()


def run_golden_of_bundle(bundle: Bundle) -> GoldenReport:
    """The same for a published bundle, whose weights are read back from its own archives."""
    from shark_llm.compile.targets import linear_form
    from shark_llm.model.config import config_from_dict

    manifest = bundle.manifest
    form = linear_form(
        manifest.target.name,
        manifest.target.cpu_features,
        quantized=manifest.weights_dtype is not None,
    )
    config = config_from_dict(manifest.config)
    return run_golden(bundle, config, _stored_parameters(bundle, config), form=form)


def _stored_parameters(bundle: Bundle, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every parameter as a whole, from the archives of all ranks, as it is stored."""
    import numpy as np
    import torch

    from shark_llm.sharding.apply import STORED_DTYPES, merge_parameter
    from shark_llm.sharding.plan import stored_parameters

    manifest = bundle.manifest
    ranks = archive_ranks(manifest.tp)
    archives = {
        rank: ArchiveReader(path) for rank, path in zip(ranks, bundle.archives, strict=True)
    }
    parameters = {}
    for name, (shape, dtype) in stored_parameters(config, manifest.plan, manifest.dtype).items():
        whole = merge_parameter(archives, name, manifest.plan[name], shape)
        copied = torch.from_numpy(np.array(whole))  # archives are mapped read-only
        parameters[name] = copied.view(STORED_DTYPES[dtype])
    return parameters
