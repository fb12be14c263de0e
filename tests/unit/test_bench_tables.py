"""The benchmark's tables and page: what a reader sees of the samples, and the command line."""

from __future__ import annotations

import pytest

from benchmark_samples import (
    OPENVINO,
    Series,
    a_case,
    a_load,
    a_result,
    a_round,
    a_serve_case,
    command,
    page,
    plots,
    results,
    tables,
)
from shark_llm.errors import UsageError


def cells(table: str, row: int = 0) -> dict[str, str]:
    """A row of a Markdown table by its header."""
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    return dict(zip(header, rows[row], strict=True))


def test_a_decode_row_has_rates_ratio_floor_and_times() -> None:
    """1 GB over 20 GB/s is a floor of 50 ms."""
    case = a_case([a_round(100), a_round(80)], [a_round(120), a_round(120)])
    bandwidth = results.Bandwidth(cores=1, triad=[18.0], read=[20.0])
    row = cells(tables.step_table(a_result(steps=[case], bandwidth=[bandwidth])))
    assert row["cores"] == "1"
    assert row["batch"] == "4"
    assert row["context"] == "128"
    assert row["shark-llm tok/s"] == f"{4 / 0.090:.1f}"
    assert row["llama.cpp tok/s"] == f"{4 / 0.120:.1f}"
    assert row["ratio to llama.cpp (range)"] == "**1.35** (1.20 - 1.50)"
    assert row["x floor, shark-llm"] == "1.80"
    assert row["x floor, llama.cpp"] == "2.40"
    assert row["wall / CPU ms, shark-llm"] == "90.00 / 90.00"
    assert row["others"] == "1 %"


def test_every_peer_of_a_step_has_its_columns() -> None:
    """OpenVINO GenAI beside llama.cpp; an older result in which it did not take part has two."""
    case = a_case([a_round(100)], [a_round(120)])
    third = Series(side=OPENVINO, rounds=[a_round(90)])
    three = case.model_copy(update={"series": [*case.series, third]})
    row = cells(tables.step_table(a_result(steps=[three])))
    assert row["ratio to llama.cpp (range)"] == "**1.20** (1.20 - 1.20)"
    assert row["OpenVINO GenAI tok/s"] == f"{4 / 0.090:.1f}"
    assert row["ratio to OpenVINO GenAI (range)"] == "**0.90** (0.90 - 0.90)"
    assert "wall / CPU ms, OpenVINO GenAI" in row
    assert "OpenVINO" not in tables.step_table(a_result(steps=[case]))


def test_a_prefill_row_counts_its_tokens_and_has_no_floor() -> None:
    case = a_case([a_round(100)], [a_round(150)], phase="prefill", batch=1)
    row = cells(tables.step_table(a_result(benchmark="prefill", steps=[case])))
    assert row["tokens"] == "128"
    assert row["shark-llm tok/s"] == "1280.0"
    assert row["ratio to llama.cpp (range)"] == "**1.50** (1.50 - 1.50)"
    assert not any("floor" in name for name in row)


def test_a_server_is_set_beside_its_module() -> None:
    """Decode of 8 takes 20 ms, so 400 tok/s; a prompt costs 50 ms in batches of 4, 100 ms alone."""
    module = [
        a_case([a_round(20)], batch=8),
        a_case([a_round(100)], phase="prefill", batch=1),
        a_case([a_round(200)], phase="prefill", batch=4),
    ]
    case = a_serve_case([a_load(tokens=1024, seconds=3.2, gap_ms=25)], module)
    result = a_result(benchmark="serve", serve=[case])
    row = cells(tables.share_table(result))
    assert row["server tok/s"] == "320.0"
    assert row["module decode tok/s"] == "400.0"
    assert row["server / decode (range)"] == "**0.80** (0.80 - 0.80)"
    assert row["between prefills / decode (range)"] == "**0.80** (0.80 - 0.80)"
    same_work = 8 * 64 / (63 * 0.020 + 8 * 0.050)
    assert tables.same_work_rates(case) == pytest.approx([same_work])
    share = f"{320 / same_work:.2f}"
    assert row["server / same work by the module (range)"] == f"**{share}** ({share} - {share})"


def test_more_streams_than_the_largest_batch_take_turns() -> None:
    """16 streams on a module of batch 8: each token of all takes two decode steps."""
    module = [
        a_case([a_round(20)], batch=8),
        a_case([a_round(200)], phase="prefill", batch=4),
    ]
    load = a_load(tokens=1024, seconds=3.2, device_wait=0.0321)
    case = a_serve_case([load], module, concurrency=16)
    assert tables.same_work_rates(case) == pytest.approx([16 * 64 / (63 * 0.040 + 4 * 0.200)])
    row = cells(tables.share_table(a_result(benchmark="serve", serve=[case])))
    assert row["module decode tok/s"] == "400.0"
    assert row["device waits"] == "3.2 %"
    older = a_serve_case([a_load(tokens=1024, seconds=3.2)], module, concurrency=16)
    assert "device waits" not in tables.share_table(a_result(benchmark="serve", serve=[older]))


def test_servers_stand_below_each_other() -> None:
    module = [a_case([a_round(20)], batch=8), a_case([a_round(100)], phase="prefill", batch=1)]
    ours, peer = a_load(tokens=1000, seconds=2), a_load(tokens=1000, seconds=4)
    both = a_result(serve=[a_serve_case([ours], module, [peer])])
    first, second = (cells(tables.serve_table(both), row) for row in (0, 1))
    assert (first["side"], first["output tok/s"], first["ratio (range)"]) == (
        "shark-llm",
        "500.0",
        "",
    )
    assert second["ratio (range)"] == "**2.00** (2.00 - 2.00)"
    assert second["TTFT p50 / max ms"] == "50 / 60"
    assert second["CPU s per 1000 tokens"] == "4.0"
    alone = cells(tables.serve_table(a_result(serve=[a_serve_case([ours], module)])))
    assert "ratio (range)" not in alone
    assert alone["others"] == "1 %"


def test_a_disturbed_run_says_so() -> None:
    calm = a_result(steps=[a_case([a_round(1)], [a_round(1)])])
    noisy = a_result(steps=[a_case([a_round(1)], [a_round(1, others=0.4)])])
    assert "disturbed" not in tables.facts(calm)
    assert "disturbed" in tables.facts(noisy)
    assert "40 % of the machine" in tables.facts(noisy)


def test_timings_are_columns() -> None:
    timings = [
        results.Timing(name="shark-llm", cores=1, values={"ready_s": [2.0, 1.0, 3.0]}),
        results.Timing(name="shark-llm", cores=2, values={"ready_s": [1.0], "other": [5.0]}),
    ]
    row = cells(tables.timing_table(timings))
    assert row["shark-llm, 1 core"] == "2.00 (1.00 - 3.00)"
    assert row["shark-llm, 2 cores"] == "1.00"
    assert cells(tables.timing_table(timings), 1)["shark-llm, 1 core"] == "-"


def test_the_page_is_fresh() -> None:
    """docs/performance.md and its plots hold what `scripts/bench render` writes."""
    text = page.PAGE.read_text()
    kept = page.kept_results()
    assert page.render(text, kept.values()) == text
    drawn = {path.name for path in page.KEPT.glob("*.svg")}
    assert drawn == {name for result in kept.values() if (name := plots.name(result)) is not None}
    for path, result in kept.items():
        if (name := plots.name(result)) is not None:
            assert plots.digest(path) in (page.KEPT / name).read_text(), f"{name} is of old samples"


def test_kept_results_have_the_names_that_keeping_gives_them() -> None:
    for path in page.KEPT.glob("*.json"):
        result = results.read(path)
        assert path.name == f"{result.benchmark}-{result.dtype}.json"


def test_rendering_replaces_what_is_between_the_markers() -> None:
    text = f"Above.\n{page.BEGIN}\nold\n{page.END}\nBelow.\n"
    decode = a_result(steps=[a_case([a_round(1)], [a_round(2)])])
    other = a_result(benchmark="build", dtype="bf16")
    once = page.render(text, [other, decode])
    assert once.startswith("Above.\n")
    assert once.endswith("\nBelow.\n")
    assert "old" not in once
    assert once.index("### Decode, bf16") < once.index("### Build, bf16"), "in the usual order"
    assert page.render(once, [decode, other]) == once


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        f"{page.BEGIN}\n",
        f"{page.END}\n{page.BEGIN}\n",
        f"{page.BEGIN}\n{page.END}\n{page.BEGIN}\n{page.END}\n",
    ],
)
def test_a_page_without_its_markers_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must have the line"):
        page.render(text, [])


def test_options_make_the_steps() -> None:
    def shapes(*arguments: str) -> list[tuple[str, int, int]]:
        found = command.shapes(command.parser().parse_args(arguments))
        return [(shape.phase, shape.batch, shape.context) for shape in found]

    assert shapes("decode") == [("decode", batch, 128) for batch in (1, 2, 4, 8, 16, 32)]
    assert shapes("decode", "--batch", "2", "--context", "64") == [("decode", 2, 64)]
    assert shapes("prefill", "--tokens", "128", "512") == [("prefill", 1, 128), ("prefill", 1, 512)]
    assert shapes("context") == [("decode", 1, tokens) for tokens in (128, 1024, 4000, 8000)]


@pytest.mark.parametrize(
    "arguments", [[], ["decode", "--rounds", "0"], ["decode", "--dtype", "f8"]]
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parser().parse_args(arguments)
    assert ended.value.code == 2
    assert "usage: scripts/bench" in capsys.readouterr().err
