"""What a bundle is, from its manifest alone: as data, and as lines to read."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from shark_llm.artifacts.irpa import DTYPE_BYTES
from shark_llm.artifacts.manifest import Function, Manifest, TensorSpec


def summarize(manifest: Manifest) -> dict[str, Any]:
    """The summary as plain JSON values; sizes in bytes."""
    config, target = manifest.config, manifest.target
    return {
        "schema_version": manifest.schema_version,
        "model": manifest.source.model_dump(),
        "weights": manifest.weights,
        "architecture": {
            name: config[name]
            for name in (
                "architecture",
                "num_layers",
                "hidden_size",
                "intermediate_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "vocab_size",
                "tie_word_embeddings",
                "rope",
            )
            if name in config
        },
        "dtype": manifest.dtype,
        "weights_dtype": manifest.weights_dtype,
        "kv_dtype": manifest.kv_dtype,
        "tp": manifest.tp,
        "plan": _plan(manifest),
        "page_size": manifest.page_size,
        "max_model_len": manifest.max_model_len,
        "kv_bytes_per_token": kv_bytes_per_token(manifest),
        "entry_points": {entry.name: _signature(entry) for entry in manifest.entry_points},
        "softmax_sums": {sums.name: _signature(sums) for sums in manifest.softmax_sums},
        "target": {
            "name": target.name,
            "driver": target.driver,
            "flags": list(target.flags),
            "cpu_features": list(target.cpu_features),
        },
        "files": {name: info.size for name, info in sorted(manifest.files.items())},
        "total_bytes": sum(info.size for info in manifest.files.values()),
        "versions": manifest.versions,
        "golden": None if manifest.golden is None else manifest.golden.model_dump(),
        "module_key": manifest.module_key,
    }


def kv_bytes_per_token(manifest: Manifest) -> list[int]:
    """Bytes of KV cache that a token takes on each rank: one slot of a page in every cache."""
    per_page = [0] * manifest.tp
    for cache in manifest.caches:
        elements = math.prod(dim for dim in cache.shape[1:] if isinstance(dim, int))
        per_page[cache.rank] += elements * DTYPE_BYTES[cache.dtype]
    return [count // manifest.page_size for count in per_page]


def summary_lines(manifest: Manifest) -> list[str]:
    """The summary to read."""
    summary = summarize(manifest)
    config, target, golden = summary["architecture"], summary["target"], summary["golden"]
    revision = f" at {manifest.source.revision}" if manifest.source.revision else ""
    dummy = ", DUMMY WEIGHTS" if manifest.weights == "dummy" else ""
    kv = summary["kv_bytes_per_token"]
    lines = [
        f"model         {manifest.source.name}{revision}{dummy}",
        f"digest        {manifest.source.digest}",
        f"architecture  {config.get('architecture')}: {config.get('num_layers')} layers, hidden "
        f"{config.get('hidden_size')}, mlp {config.get('intermediate_size')}, "
        f"{config.get('num_heads')} query and {config.get('num_kv_heads')} kv heads of "
        f"{config.get('head_dim')}, vocabulary {manifest.vocab_size}",
        f"dtype         {manifest.precision}, KV cache {manifest.kv_dtype}",
        f"tp            {manifest.tp}; {_plan_text(summary['plan'])}",
        f"context       up to {manifest.max_model_len} tokens, pages of {manifest.page_size}",
        f"KV cache      {' + '.join(map(str, kv))} bytes per token"
        + (" (rank by rank)" if manifest.tp > 1 else ""),
        f"target        {target['name']}, driver {target['driver']}",
        f"flags         {' '.join(target['flags'])}",
    ]
    if target["cpu_features"]:
        lines.append(f"needs         {' '.join(target['cpu_features'])}")
    lines += [f"entry point   {name}{text}" for name, text in summary["entry_points"].items()]
    lines += [f"file          {name}: {size} bytes" for name, size in summary["files"].items()]
    lines.append(f"in all        {summary['total_bytes'] / 1e6:.1f} MB")
    lines.append(
        "versions      " + ", ".join(f"{name} {v}" for name, v in sorted(manifest.versions.items()))
    )
    lines.append(
        "golden check  not run when it was built"
        if golden is None
        else f"golden check  largest error {golden['max_abs_error']:.2g} of "
        f"{golden['tolerance']:.2g} allowed, over {golden['prompt_tokens']} prompt tokens and "
        f"{golden['decode_steps']} decode steps"
    )
    return lines


def _plan(manifest: Manifest) -> dict[str, int]:
    """How many parameters are split along each dimension, and how many are replicated."""
    kinds = Counter(
        "replicate" if placement.kind == "replicate" else f"split dim {placement.dim}"
        for placement in manifest.plan.values()
    )
    return dict(sorted(kinds.items()))


def _plan_text(plan: dict[str, int]) -> str:
    return ", ".join(f"{count} parameters {kind}" for kind, count in plan.items())


def _signature(function: Function) -> str:
    """`(tokens 1xseqxi64, ...) -> (logits 1x256xf32)`, caches left out."""
    inputs, results = (
        ", ".join(map(_tensor, specs)) for specs in (function.inputs, function.results)
    )
    return f"({inputs}) -> ({results})"


def _tensor(spec: TensorSpec) -> str:
    return f"{spec.name} {'x'.join([*map(str, spec.shape), spec.dtype])}"
