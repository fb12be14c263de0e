"""The compiler as we run it: its errors, its flags, its determinism, and every target."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundles import model_config
from shark_llm.compile.compiler import run_compiler
from shark_llm.compile.targets import get_target, target_names
from shark_llm.errors import CompileError
from shark_llm.export.compose import export_module
from shark_llm.export.signatures import ExportSettings
from shark_llm.sharding.plan import local_parameters, plan_parameters

SOURCE = """
func.func @double(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = arith.addf %x, %x : tensor<4xf32>
  return %y : tensor<4xf32>
}
"""
QUICK = {"host", "x86-64-v3", "x86-64-v4", "gfx942", "gfx950"}
CompiledModel = Callable[[str], Any]  # of conftest.py: name -> Compiled


def flags_of(target: str) -> tuple[str, ...]:
    return get_target(target).compile_flags(1)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "target",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long)
     for name in target_names()],
)  # fmt: skip
def test_every_target_compiles_a_tiny_model(tmp_path: Path, target: str) -> None:
    """Prefill and decode of a tiny model, with the row's own forms; GPU code holds the fused
    attention operation."""
    row, config = get_target(target), model_config(num_hidden_layers=1)
    settings = ExportSettings(batch_sizes_prefill=(1,), batch_sizes_decode=(1,))
    plan = plan_parameters(config, 1)
    exported = export_module(config, plan, 1, settings, row.attention_form, row.linear_form)
    gpu = row.driver in ("hip", "cuda")
    assert ("tm_tensor.attention" in exported.mlir) == gpu
    source, module = tmp_path / "model.mlir", tmp_path / "model.vmfb"
    source.write_text(exported.mlir)
    result = run_compiler(source, module, row.compile_flags(1))
    assert module.stat().st_size > 10_000
    assert result.seconds > 0
    assert result.peak_memory_bytes > 10 << 20


def test_wide_hidden_states_of_several_ranks_compile(tmp_path: Path) -> None:
    """Llama 3.1 8B at tp8 failed for gfx942 after eight minutes with "operation's operand is
    unlinked": hidden states of two ranks came out of a chunk of layers in one buffer. One layer of
    that width at tp3 showed it too, in the phase (stream) in which buffers are placed."""
    config = model_config(
        num_hidden_layers=1, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8
    )
    row, settings = (
        get_target("gfx942"),
        ExportSettings(batch_sizes_prefill=(1,), batch_sizes_decode=(1,)),
    )
    exported = export_module(
        config, plan_parameters(config, 3), 3, settings, row.attention_form, row.linear_form
    )
    source = tmp_path / "model.mlir"
    source.write_text(exported.mlir)
    run_compiler(source, tmp_path / "out.mlir", (*row.compile_flags(3), "--compile-to=stream"))


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_gpus_widen_int8_weights_inside_the_product(tmp_path: Path, target: str) -> None:
    """No dispatch makes a whole weight in bf16: it would be written and read again in every step.
    The products read them as they are stored."""
    row, config = get_target(target), model_config(num_hidden_layers=1)
    settings = ExportSettings(batch_sizes_prefill=(1,), batch_sizes_decode=(1, 4))
    plan = plan_parameters(config, 2, quantized=True)
    exported = export_module(config, plan, 2, settings, row.attention_form, row.linear_form)
    source, flow = tmp_path / "model.mlir", tmp_path / "flow.mlir"
    source.write_text(exported.mlir)
    run_compiler(source, flow, (*row.compile_flags(2), "--compile-to=flow"))
    dispatches = re.findall(r"= flow\.dispatch @.*: \((.*)\) -> (.*)", flow.read_text())
    shapes = {
        "x".join(map(str, part.shape))
        for rank in range(2)
        for part in local_parameters(config, plan, rank, "bf16").values()
        if part.dtype == "i8"
    }
    read, made = (" ".join(types) for types in zip(*dispatches, strict=True))
    assert all(f"tensor<{shape}xi8>" in read for shape in shapes)
    assert not [shape for shape in shapes if f"tensor<{shape}xbf16>" in made]
    assert not [shape for shape in shapes if f"tensor<{shape}xf32>" in made]


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("func.func @f( {", (), "model.mlir:1:"),
        (SOURCE, ("--no-such-flag=3",), "'--no-such-flag=3'"),
        (SOURCE, ("--iree-llvmcpu-target-cpu=pentium-9000",), "pentium-9000"),
    ],
)
def test_compiler_errors_become_one_line(
    tmp_path: Path, text: str, flags: tuple[str, ...], message: str
) -> None:
    """The first diagnostic and the command, no module, no traceback. The second and third case show
    too that flags reach the compiler."""
    source, module = tmp_path / "model.mlir", tmp_path / "model.vmfb"
    source.write_text(text)
    with pytest.raises(CompileError) as caught:
        run_compiler(source, module, (*flags_of("x86-64-v3"), *flags))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "iree-compile model.mlir -o" in str(caught.value)
    assert not module.exists()


def test_extra_flags_change_the_module(tmp_path: Path) -> None:
    """What --extra-compile-arg passes takes effect: here, another container of the module."""
    source = tmp_path / "model.mlir"
    source.write_text(SOURCE)
    plain, other = tmp_path / "plain.vmfb", tmp_path / "other.vmfb"
    run_compiler(source, plain, flags_of("x86-64-v3"))
    run_compiler(source, other, (*flags_of("x86-64-v3"), "--iree-vm-emit-polyglot-zip=false"))
    assert digest(plain) != digest(other)


def test_compile_command_rebuilds_the_same_module(tmp_path: Path, compiled: CompiledModel) -> None:
    """compile-command.sh, from another directory, gives the digest that the manifest names: the
    compiler is deterministic and the command is the one that was run."""
    made = compiled("wide")
    output = tmp_path / "again.vmfb"
    subprocess.run(
        ["bash", str(made.dev / "compile-command.sh"), str(output)], cwd=tmp_path, check=True
    )
    assert digest(output) == made.bundle.manifest.files["model.vmfb"].sha256
