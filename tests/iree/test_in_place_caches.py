"""Caches are updated in place: no copy and no allocation of a compiled module is as large as one.

The number of pages is only known when a module runs. Here it is set to a prime before compiling, so
that every size which depends on it becomes a constant that can be compared with a cache's.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bundles import model_config
from shark_llm.compile.compiler import run_compiler
from shark_llm.compile.targets import get_target
from shark_llm.export.compose import ExportedModule, export_module
from shark_llm.export.signatures import ExportSettings
from shark_llm.model.config import ModelConfig
from shark_llm.model.kv_cache import page_elements
from shark_llm.sharding.plan import plan_parameters, plan_ranks

POOL_PAGES = 1000003
POOL_DIM = re.compile(r"hal\.buffer_view\.dim<%[kv]_\d+_\d+ : !hal\.buffer_view>\[0\] : index")
OTHER_DIM = re.compile(r"hal\.buffer_view\.dim<%(tokens|page_table|hidden_\d+) : ")
WEIGHT_COPY = re.compile(r"stream\.cmd\.copy .*: !stream\.resource<constant>")
CONSTANT = re.compile(r"(%[\w#]+) = arith\.constant (\d+) : index")
COPY = re.compile(r"stream\.(?:cmd\.copy|async\.copy|async\.update) .*?, (%[\w#]+) : ")
CLONE = re.compile(r"stream\.(?:async\.clone|async\.transfer) .*\{(%[\w#]+)\}")
ALLOCATION = re.compile(r"stream\.resource\.alloca? .*\{(%[\w#]+)\}")


def config_for(tp: int) -> ModelConfig:
    """Heads for all ranks: 4 query heads on 2 kv heads up to tp 4, 8 on 2 beyond. For two ranks
    there are two chunks of layers."""
    layers = 5 if tp == 2 else 2
    return model_config(num_attention_heads=8 if tp > 4 else 4, num_hidden_layers=layers)


def exported(target: str, tp: int, settings: ExportSettings) -> ExportedModule:
    config, row = config_for(tp), get_target(target)
    return export_module(
        config, plan_parameters(config, tp), tp, settings, row.attention_form, row.linear_form
    )


def with_fixed_pool(mlir: str) -> str:
    """The module with POOL_PAGES pages, whatever it is called with."""
    fixed, count = POOL_DIM.subn(f"arith.constant {POOL_PAGES} : index", mlir)
    assert count > 0, "no function reads the size of the pool"
    dims = len(re.findall(r"hal\.buffer_view\.dim<", fixed))
    assert dims == len(OTHER_DIM.findall(fixed)), "another way to read the size of the pool"
    return fixed


def stream_phase(mlir: str, target: str, tp: int, tmp_path: Path) -> str:
    source, output = tmp_path / "model.mlir", tmp_path / "model.stream.mlir"
    source.write_text(with_fixed_pool(mlir))
    run_compiler(source, output, (*get_target(target).compile_flags(tp), "--compile-to=stream"))
    return output.read_text()


def large_operations(stream: str, limit: int) -> list[str]:
    """Copies, clones and allocations of at least `limit` bytes."""
    constants: dict[str, int] = {}
    found = []
    for line in stream.splitlines():
        if constant := CONSTANT.search(line):
            constants[constant[1]] = int(constant[2])
        for pattern in (COPY, CLONE, ALLOCATION):
            size = pattern.search(line)
            if size and constants.get(size[1], 0) >= limit:
                found.append(line.strip())
    return found


def copied_weights(stream: str) -> list[str]:
    """Copies of what was loaded with the module, in functions: each step would make them again."""
    steps = stream[stream.index("  util.func ") :]
    return [line.strip() for line in steps.splitlines() if WEIGHT_COPY.search(line)]


def smallest_cache_bytes(tp: int, settings: ExportSettings) -> int:
    config = config_for(tp)
    itemsize = {"f32": 4, "bf16": 2}[settings.dtype]
    heads = min(rank.num_kv_heads for rank in plan_ranks(config, tp))
    return POOL_PAGES * page_elements(heads, settings.page_size, config.head_dim) * itemsize


@pytest.mark.parametrize(
    ("target", "tp", "settings"),
    [
        ("host", 1, ExportSettings(batch_sizes_prefill=(1, 4), batch_sizes_decode=(1, 4))),
        # Ranks of one kv head each: an index tensor that is a constant by itself was hoisted
        # without a device here, and every decode step copied, and then lost, whole caches.
        ("host", 2, ExportSettings(batch_sizes_prefill=(2,), batch_sizes_decode=(2,))),
        ("gfx942", 1, ExportSettings(batch_sizes_prefill=(1,), batch_sizes_decode=(1, 4))),
        # Decode of several rows copied each rank's output matrix in every step.
        ("gfx942", 2, ExportSettings(batch_sizes_prefill=(1,), batch_sizes_decode=(1, 4))),
        *(
            (target, tp, ExportSettings(batch_sizes_prefill=(1,), batch_sizes_decode=(1,)))
            for target in ("host", "gfx942")
            for tp in (3, 8)
        ),
    ],
    ids=lambda value: value if isinstance(value, str | int) else "",
)
def test_nothing_is_as_large_as_a_cache(
    tmp_path: Path, target: str, tp: int, settings: ExportSettings
) -> None:
    stream = stream_phase(exported(target, tp, settings).mlir, target, tp, tmp_path)
    limit = smallest_cache_bytes(tp, settings)
    entries = len(settings.batch_sizes_prefill) + len(settings.batch_sizes_decode)
    imports = stream.count(f"tensor<?x{limit // POOL_PAGES // 2}xbf16>{{%c{POOL_PAGES}}}")
    caches = 2 * config_for(tp).num_layers * tp
    assert imports >= entries * caches, "the caches are not where this test looks"
    assert stream.count("stream.cmd.dispatch") > 0
    assert large_operations(stream, limit) == []
    assert copied_weights(stream) == []


def test_cache_that_is_not_consumed_is_copied_and_found(tmp_path: Path) -> None:
    """The check can fail: without `consume` the caller's caches must be kept, and are copied."""
    settings = ExportSettings(batch_sizes_prefill=(1,), batch_sizes_decode=(1,), dtype="f32")
    mlir = exported("host", 1, settings).mlir
    assert " consume " in mlir
    stream = stream_phase(mlir.replace(" consume ", " "), "host", 1, tmp_path)
    found = large_operations(stream, smallest_cache_bytes(1, settings))
    assert any("copy" in line or "clone" in line for line in found)
    assert any("alloca" in line for line in found)
