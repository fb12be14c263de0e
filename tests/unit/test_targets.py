"""Compile targets: rows of data, and what they turn into."""

from __future__ import annotations

import pytest

from shark_llm.artifacts.cpu import host_cpu_features, missing_cpu_features
from shark_llm.compile import targets
from shark_llm.compile.targets import TARGETS, get_target, host_target, target_names
from shark_llm.errors import UnsupportedTargetError
from shark_llm.export.prefill_walk import STACK_BYTES

WANTED = (
    "host", "x86-64-v3", "x86-64-v4", "gfx942", "gfx950", "gfx90a", "gfx1100", "sm_80", "sm_89",
)  # fmt: skip


def test_all_targets_have_rows() -> None:
    assert target_names() == WANTED
    for name in WANTED:
        row = get_target(name)
        assert row.name == name
        assert "\n" not in row.description


@pytest.mark.parametrize("name", ["gfx940", "sm_90", "", "HOST", "gfx942 "])
def test_unknown_target_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(UnsupportedTargetError) as caught:
        get_target(name)
    assert str(caught.value) == (f"no compile target {name!r}: choose from {', '.join(WANTED)}")


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "gfx90a", "gfx1100"])
def test_amd_rows(name: str) -> None:
    row = get_target(name)
    assert (row.driver, row.backend, row.attention_form) == ("hip", "rocm", "fused")
    assert row.linear_form.form == "plain"
    assert row.memory_bytes is not None
    flags = row.compile_flags(8)
    assert flags[:8] == tuple(f"--iree-hal-target-device=hip[{rank}]" for rank in range(8))
    assert f"--iree-rocm-target={name}" in flags


def test_gfx950_does_not_load_directly_into_shared_memory() -> None:
    """The compiler died of SIGFPE on small products: the kv heads of a rank, a tiny model's MLP."""
    flag = "--iree-llvmgpu-use-direct-load=false"
    assert [name for name, row in TARGETS.items() if flag in row.flags] == ["gfx950"]


@pytest.mark.parametrize("name", ["sm_80", "sm_89"])
def test_nvidia_rows(name: str) -> None:
    flags = get_target(name).compile_flags(2)
    assert flags[:2] == ("--iree-hal-target-device=cuda[0]", "--iree-hal-target-device=cuda[1]")
    assert f"--iree-cuda-target={name}" in flags


@pytest.mark.parametrize("name", ["host", "x86-64-v3", "x86-64-v4"])
def test_cpu_rows(name: str) -> None:
    """One simulated device for each rank; the instruction sets are those the flags turn on."""
    row = get_target(name)
    assert (row.driver, row.attention_form, row.memory_bytes) == ("local-task", "matmul", None)
    flags = row.compile_flags(2)
    assert flags[:3] == (
        "--iree-hal-target-device=local[0]",
        "--iree-hal-target-device=local[1]",
        "--iree-hal-local-target-device-backends=llvm-cpu",
    )
    assert f"--iree-llvmcpu-target-cpu={name}" in flags
    assert row.cpu_features


def test_host_needs_what_this_machine_has() -> None:
    assert set(host_target().cpu_features) == host_cpu_features()
    assert missing_cpu_features(host_target().cpu_features) == ()


def test_host_with_bf16_instructions_uses_the_compilers_tiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "host_cpu_features", lambda: frozenset({"avx512_bf16"}))
    row = host_target()
    assert row.linear_form.form == "plain"
    assert "--iree-global-opt-data-tiling" in row.flags
    monkeypatch.setattr(targets, "host_cpu_features", lambda: frozenset({"avx2"}))
    row = host_target()
    assert row.linear_form.form == "packed"
    assert "--iree-global-opt-data-tiling" not in row.flags


@pytest.mark.parametrize("features", [{"avx2"}, {"avx512f"}, {"avx512f", "avx512_bf16"}])
def test_every_cpu_lets_attention_have_its_buffer(
    features: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's own limit is less: it would refuse the module."""
    monkeypatch.setattr(targets, "host_cpu_features", lambda: frozenset(features))
    for row in (host_target(), host_target(quantized=True), TARGETS["x86-64-v4"]):
        assert f"--iree-llvmcpu-stack-allocation-limit={STACK_BYTES}" in row.flags


def test_newer_cpu_row_includes_the_older_ones_instructions() -> None:
    assert set(TARGETS["x86-64-v3"].cpu_features) < set(TARGETS["x86-64-v4"].cpu_features)
