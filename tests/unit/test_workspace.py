"""compile/workspace.py: the buffers of a step, followed through a module by hand."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shark_llm.compile.dev_directory import write_report
from shark_llm.compile.workspace import built_workspace, module_workspace
from shark_llm.errors import CompileError, UsageError

DEVICE_0, DEVICE_1 = (f"on(#hal.device.affinity<@__device_{rank}>)" for rank in range(2))
EITHER = "on(#hal.device.optimal<[#hal.device.affinity<@__device_0>, " + DEVICE_1[3:-1] + "]>)"
ALLOCA, DEALLOCA = "stream.resource.alloca uninitialized", "stream.resource.dealloca"

# %s tokens a row, %p pages. The chunk returns %r, frees %a, and drops %b.
CHUNK = f"""\
  util.func private @prefill_bs2.layers.0(%arg0: !r, %arg1: !v) -> (!r, index, !t) {{
    %c100 = arith.constant 100 : index
    %0 = hal.buffer_view.dim<%arg1 : !v>[1] : index
    %1 = arith.muli %0, %c100 overflow<nsw> : index
    %a, %t0 = {ALLOCA} {DEVICE_1} => !r{{%1}} => !t
    %2 = stream.cmd.execute {DEVICE_1} with(%a as %arg9: !r) {{
      %c100 = arith.constant 7 : index
      stream.cmd.dispatch @x
    }}
    %3 = {DEALLOCA} {DEVICE_1} await(%2) => %a : !r{{%1}} => !t
    %b, %t1 = {ALLOCA} {DEVICE_1} => !r{{%c100}} => !t
    %r, %t2 = {ALLOCA} {DEVICE_0} => !r{{%1}} => !t
    util.return %r, %1, %t2 : !r, index, !t
  }}
"""
ENTRY = f"""\
  util.func public @prefill_bs2(%arg0: !v, %arg1: !v, %arg2: !v, %arg3: !v) -> (!v) {{
    %c64 = arith.constant 64 : index
    %c2_i64 = arith.constant 2 : i64
    %s = hal.buffer_view.dim<%arg0 : !hal.buffer_view>[1] : index
    %p = hal.buffer_view.dim<%arg3 : !hal.buffer_view>[1] : index
    %10 = arith.index_cast %p : index to i64
    %11 = arith.muli %10, %c2_i64 : i64
    %12 = arith.index_cast %11 : i64 to index
    %13 = util.align %12, %c64 : index
    %x, %t0 = {ALLOCA} {EITHER} => !r{{%13}} => !t
    %h = stream.tensor.export {DEVICE_0} %x : tensor<2x?xf32>{{%s}} in !r{{%13}} -> !v
    %20:3 = util.call @prefill_bs2.layers.0(%x, %h) : (!r, !v) -> (!r, index, !t)
    %y, %t1 = {ALLOCA} {DEVICE_0} => !r{{%20#1}} => !t
    %21:3 = util.call @prefill_bs2.layers.0(%20#0, %h) : (!r, !v) -> (!r, index, !t)
    util.return %arg0 : !v
  }}
"""
MODULE = f"module {{\n{CHUNK}{ENTRY}}}\n"


def test_buffers_are_counted_while_they_live() -> None:
    """32 tokens a row: 3200 bytes for %a, %r and %y; 10 pages: %x is 20 bytes, aligned to 64."""
    found = module_workspace(MODULE, 2, prefill_tokens=64, context_tokens=160, page_size=16)
    # Device 0: %x, both %r and %y. Device 1: %x, and %a before it is freed.
    assert found == {"prefill_bs2": (64 + 3200 + 3200 + 3200, 64 + 3200)}


def test_decode_has_one_token_a_row() -> None:
    text = MODULE.replace("prefill_bs2", "decode_bs2")
    found = module_workspace(text, 2, prefill_tokens=64, context_tokens=16, page_size=16)
    assert found == {"decode_bs2": (64 + 3 * 100, 64 + 100)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODULE.replace("muli %0, %c100", "remsi %0, %c100"), "@prefill_bs2.layers.0 alloc"),
        ("module {\n}\n", "no entry points"),
    ],
)
def test_what_cannot_be_followed_is_said(text: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        module_workspace(text, 2, prefill_tokens=64, context_tokens=16, page_size=16)


def dev_artifacts(root: Path, **changes: Any) -> Path:
    """What a build of "tiny" for gfx942 at tp2 left, with its phases."""
    dev = root / "dev"
    (dev / "phases").mkdir(parents=True)
    (dev / "phases" / "model.7.stream.mlir").write_text(MODULE)
    settings = {"target": "gfx942", "tp": 2, "page_size": 16}
    write_report(dev, {"model": "tiny", "settings": settings} | changes)
    return dev


def test_a_build_s_phases_are_found(tmp_path: Path) -> None:
    dev = dev_artifacts(tmp_path)
    of_tiny = partial(built_workspace, dev, model="tiny", target="gfx942", context_tokens=160)
    assert of_tiny() == {2: (64 + 3 * 100 * 256, 64 + 100 * 256)}, "512 tokens in two rows"
    assert of_tiny(prefill_tokens=64) == {2: (64 + 3 * 100 * 32, 64 + 100 * 32)}


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        ("other", "gfx942", "is of tiny for gfx942, and the plan is of other for gfx942: leave"),
        ("tiny", "host", "is of tiny for gfx942, and the plan is of tiny for host"),
    ],
)
def test_a_build_of_something_else_is_refused(
    tmp_path: Path, model: str, target: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        built_workspace(dev_artifacts(tmp_path), model=model, target=target, context_tokens=16)


def test_a_build_without_phases_is_refused(tmp_path: Path) -> None:
    dev = dev_artifacts(tmp_path)
    (dev / "phases" / "model.7.stream.mlir").unlink()
    with pytest.raises(UsageError, match=r"no phases.*: build it with --save-intermediates"):
        built_workspace(dev, model="tiny", target="gfx942", context_tokens=16)
    (dev / "build-report.json").write_text(json.dumps({}))
    with pytest.raises(UsageError, match=r"has no build-report\.json: name what a build wrote"):
        built_workspace(dev, model="tiny", target="gfx942", context_tokens=16)
