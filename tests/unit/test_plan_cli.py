"""shark-compile plan: what it prints, as a table, rank by rank and as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from bundles import model_config
from shark_llm.cli.command_line import run_app
from shark_llm.cli.plan import plan
from shark_llm.cli.plan_text import PlanReport, print_report
from shark_llm.compile.targets import TARGETS
from shark_llm.planner import GIB, GPU_TARGETS, GPUS, DeviceMemory, plan_memory
from shark_llm.sharding.plan import plan_ranks
from tiny import tiny_config, write_tiny

CONFIGS = Path(__file__).parents[1] / "published_configs"
LLAMA_405B = CONFIGS / "meta-llama--Llama-3.1-405B.json"
SMOLLM2 = CONFIGS / "HuggingFaceTB--SmolLM2-135M.json"


def run(*arguments: str | Path) -> int:
    """The exit code of the command alone."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command("plan")(plan)
    app.callback()(lambda: None)  # keeps it a subcommand
    with pytest.raises(SystemExit) as caught:
        run_app(app, "shark-compile", ["plan", *map(str, arguments)], {})
    code = caught.value.code
    assert isinstance(code, int)
    return code


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert isinstance(fields, dict)
    return fields


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--hf-model", LLAMA_405B, "--compile-target", "gfx942") == 0
    out = capsys.readouterr().out
    assert "mi300x: 192.0 GiB for each rank" in out
    assert "workspace (est.)" in out
    rows = [line.split() for line in out.splitlines() if line[:2].strip().isdigit()]
    assert [row[0] for row in rows] == list("12345678")
    assert rows[3] == ["4", "189.00", "GiB", "126", "KiB", "3.03", "GiB", "0", "no"]
    assert [row[-1] for row in rows] == ["no"] * 4 + ["yes"] * 4
    assert "the least tp that fits is 5" in out


def test_on_a_terminal_it_is_drawn() -> None:
    config = model_config()
    report = PlanReport(
        name="tiny",
        config=config,
        target="gfx942",
        device=DeviceMemory(name="mi300x", num_bytes=GIB * 8),
        dtype="f32",
        weights_dtype=None,
        max_model_len=512,
        step_tokens=512,
        memory=plan_memory(config, memory_bytes=GIB * 8, dtype="f32", kv_dtype="f32"),
        ranks=plan_ranks(config, 2),
    )
    drawn, plain = io.StringIO(), io.StringIO()
    print_report(report, Console(file=drawn, force_terminal=True, width=120))
    print_report(report, Console(file=plain, width=20))
    assert "┃" in drawn.getvalue()
    assert "┃" not in plain.getvalue()
    for text in ("KV tokens left", "query heads", "2 (2-3)"):
        assert text in drawn.getvalue()
        assert text in plain.getvalue()


def test_what_each_rank_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--hf-model", SMOLLM2, "--tp", "5") == 0
    ranks = [line.split() for line in capsys.readouterr().out.splitlines()[-5:]]
    assert [row[1] for row in ranks] == ["2", "1", "2", "1", "3"]
    assert [row[4] for row in ranks] == ["(0-0)", "(0-0)", "(1-1)", "(1-1)", "(2-2)"]


def test_json_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """B02: the kv heads of each rank, and KV bytes that follow them."""
    flags = ("--hf-model", LLAMA_405B, "--compile-target", "gfx942", "--gpu", "mi325x")
    fields = as_json(capsys, *flags, "--tp", "8", "--max-num-seqs", "4", "--dtype", "f16")
    assert (fields["device"], fields["memory_bytes"]) == ("mi325x", 256 * GIB)
    assert fields["dtype"] == fields["kv_dtype"] == "f16"
    assert all(split["workspace_is_estimate"] for split in fields["splits"])
    assert [split["tp"] for split in fields["splits"]] == list(range(1, 9))
    last = fields["splits"][-1]
    assert last["kv_tokens_needed"] == 4 * 131072
    assert fields["lower_bound"] == next(s["tp"] for s in fields["splits"] if s["fits"])
    assert [rank["kv_heads"] for rank in last["ranks"]] == [[r, r + 1] for r in range(8)]
    assert {rank["kv_bytes_per_token"] for rank in last["ranks"]} == {2 * 126 * 128 * 2}
    parameters = fields["placement"]["parameters"]
    assert fields["placement"]["tp"] == 8
    assert parameters["blk.125.attn_norm.weight"] == {"kind": "replicate"}
    assert parameters["blk.0.ffn_down.weight"]["ranges"][7] == [46592, 53248]
    assert "placement" not in as_json(capsys, "--hf-model", SMOLLM2)


def test_larger_steps_need_more_workspace(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--hf-model", LLAMA_405B, "--compile-target", "gfx942")
    usual = as_json(capsys, *flags)
    large = as_json(capsys, *flags, "--max-num-batched-tokens", "8192")
    assert (usual["max_num_batched_tokens"], large["max_num_batched_tokens"]) == (512, 8192)
    assert usual["lower_bound"] == 5 < large["lower_bound"]
    five = large["splits"][4]
    assert 0 < five["longest_len"] < 131072
    longest = as_json(
        capsys,
        *flags,
        *("--max-num-batched-tokens", "8192", "--max-model-len", str(five["longest_len"])),
    )
    assert longest["splits"][4]["fits"]


def test_int8_weights_take_half_the_room(capsys: pytest.CaptureFixture[str]) -> None:
    """Scales come on top, and are placed as their rows are; the KV cache stays as it is."""
    flags = ("--hf-model", LLAMA_405B, "--compile-target", "gfx942", "--dtype", "bf16", "--tp", "8")
    whole = as_json(capsys, *flags)
    fields = as_json(capsys, *flags, "--weights-dtype", "int8")
    assert (whole["weights_dtype"], fields["weights_dtype"]) == (None, "int8")
    assert (fields["dtype"], fields["kv_dtype"]) == ("bf16", "bf16")
    weights = [each["splits"][-1]["ranks"][0]["weight_bytes"] for each in (whole, fields)]
    assert 0.5 < weights[1] / weights[0] < 0.501
    assert fields["lower_bound"] < whole["lower_bound"]
    parameters = fields["placement"]["parameters"]
    assert parameters["blk.0.ffn_up.scale"] == parameters["blk.0.ffn_up.weight"]
    assert parameters["blk.0.ffn_down.scale"] == {"kind": "replicate"}
    assert run(*flags, "--weights-dtype", "int8") == 0
    assert "weights and KV cache in bf16 with int8 weights" in capsys.readouterr().out


def test_a_directory_will_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With or without weights in it."""
    full = write_tiny(tmp_path / "full")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((full / "config.json").read_bytes())
    first, second = (as_json(capsys, "--hf-model", tmp_path / name) for name in ("full", "bare"))
    assert (first.pop("model"), second.pop("model")) == ("full", "bare")
    assert first == second
    assert [split["tp"] for split in first["splits"]] == [1, 2, 3, 4]


def test_the_ranks_of_a_cpu_share_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    fields = as_json(capsys, "--hf-model", SMOLLM2, "--compile-target", "x86-64-v3")
    assert fields["memory_is_shared"] is True
    for split in fields["splits"]:
        left = fields["memory_bytes"] - fields["reserve_bytes"]
        left -= sum(rank["weight_bytes"] + rank["workspace_bytes"] for rank in split["ranks"])
        per_token = sum(rank["kv_bytes_per_token"] for rank in split["ranks"])
        assert split["kv_tokens"] == left // per_token
        assert len({rank["kv_tokens"] for rank in split["ranks"]}) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--weights-dtype", "q4"), 2, "--weights-dtype is 'q4'; it must be one of int8"),
        (("--dtype", "f8"), 2, "--dtype is 'f8'; it must be one of auto, bf16, f16, f32"),
        (("--max-num-seqs", "0"), 2, "--max-num-seqs is 0; it must be at least 1"),
        (("--max-num-batched-tokens", "0"), 2, "--max-num-batched-tokens is 0; it must be at"),
        (("--max-model-len", "131073"), 2, "--max-model-len is 131073: this model takes 1 to 131"),
        (("--max-model-len", "0"), 2, "--max-model-len is 0: this model takes 1 to 131072"),
        (("--compile-target", "gfx1"), 2, "no compile target 'gfx1'"),
        (("--gpu", "mi300x"), 2, "--gpu mi300x is a gfx942, and the compile target is host"),
        (("--gpu", "h100"), 2, "no such GPU: 'h100'; choose from mi250x, mi300a, mi300x"),
        (("--tp", "9"), 1, "tp 9 cannot split this model"),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    assert run("--hf-model", LLAMA_405B, *arguments) == code
    assert message in capsys.readouterr().err


def test_a_tp_without_heads_is_refused_from_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B04: before any weight is there, with the tp values that work."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert run("--hf-model", tmp_path, "--tp", "5") == 1
    assert "tp values that work: 1, 2, 3, 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("length", "last"),
    [
        ((), "no tp fits, whatever the length: use devices with more memory"),
        (("--gpu", "mi300a", "--max-num-seqs", "9"), "no tp fits; tp 8 would with --max-model-len"),
    ],
)
def test_what_would_fit_is_said(
    capsys: pytest.CaptureFixture[str], length: tuple[str, ...], last: str
) -> None:
    target = "gfx942" if length else "gfx90a"
    assert run("--hf-model", LLAMA_405B, "--compile-target", target, *length) == 0
    assert last in capsys.readouterr().out.splitlines()[-1]


def test_every_gpu_is_of_a_known_target() -> None:
    assert GPU_TARGETS.keys() == GPUS.keys()
    assert set(GPU_TARGETS.values()) <= TARGETS.keys()
