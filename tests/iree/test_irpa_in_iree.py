"""A module takes its parameters from our archives: data and splat, two files in one scope."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from iree import compiler as ireec
from iree import runtime as rt
from shark_llm.artifacts.irpa import ArchiveWriter, Entry, Identity

MODULE = """
util.global private @a = #flow.parameter.named<"model"::"a"> : tensor<4xf32>
util.global private @b = #flow.parameter.named<"model"::"b.rank0"> : tensor<4xf32>
util.func public @sum() -> tensor<4xf32> {
  %a = util.global.load @a : tensor<4xf32>
  %b = util.global.load @b : tensor<4xf32>
  %s = arith.addf %a, %b : tensor<4xf32>
  util.return %s : tensor<4xf32>
}
"""


def test_parameters_reach_the_module(tmp_path: Path) -> None:
    shared, rank_0 = tmp_path / "model.irpa", tmp_path / "model.rank0.irpa"
    identity = Identity(model="a" * 64, tp=2, rank=None, dtype="f32")
    with ArchiveWriter(shared, identity, [Entry(name="a", dtype="f32", shape=(4,))]) as archive:
        archive.write("a", np.arange(4, dtype=np.float32).data, at=0)
    splat = Entry(name="b.rank0", dtype="f32", shape=(4,), splat=b"\x00\x00\x00\x3f")
    with ArchiveWriter(rank_0, identity, [splat]):
        pass
    index = rt.ParameterIndex()
    for path in (shared, rank_0):
        index.load(str(path))
    binary = ireec.compile_str(
        MODULE,
        target_backends=["llvm-cpu"],
        extra_args=["--iree-llvmcpu-target-cpu=host"],
    )
    config = rt.Config("local-sync")
    parameters = rt.create_io_parameters_module(
        config.vm_instance, index.create_provider(scope="model")
    )
    module = rt.VmModule.copy_buffer(config.vm_instance, binary)
    modules = rt.load_vm_modules(parameters, module, config=config)
    result = modules[-1]["sum"]().to_host()
    np.testing.assert_array_equal(result, np.arange(4, dtype=np.float32) + 0.5)
