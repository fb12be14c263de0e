"""What the plots of docs/performance.md show; drawing them needs matplotlib."""

from __future__ import annotations

from benchmark_samples import (
    OURS,
    PEER,
    a_case,
    a_load,
    a_result,
    a_round,
    a_serve_case,
    plots,
    results,
)


def step(batch: int, ours: list[int], theirs: list[int], **changes: int) -> results.StepCase:
    case = a_case([a_round(ms) for ms in ours], [a_round(ms) for ms in theirs])
    return case.model_copy(update={"batch": batch, **changes})


def test_lines_are_medians_with_the_range_of_rounds() -> None:
    cases = [
        step(8, [100, 200, 400], [400, 400, 400]),
        step(1, [50, 50, 50], [100, 100, 100]),
        step(2, [50, 50, 50], [100, 100, 100]),
        step(4, [10, 10, 10], [20, 20, 20], cores=2),
    ]
    result = a_result(steps=cases)
    one, two = plots._panels(result)
    assert (one["title"], one["x"]) == ("1 core", [1, 2, 8])
    ours, theirs = one["lines"]
    assert (ours["label"], theirs["label"]) == (OURS, PEER)
    assert ours["y"] == [20, 40, 40]
    assert (ours["low"], ours["high"]) == ([20, 40, 20], [20, 40, 80])
    assert theirs["y"] == [10, 20, 20]
    assert (two["title"], two["x"]) == ("2 cores", [4])
    assert plots.name(result) == "decode-bf16.svg"


def test_contexts_and_prompts_are_of_the_smallest_batch() -> None:
    cases = [
        step(batch, [50], [100], context=context)
        for batch in (1, 4)
        for context in (8000, 128, 1024)
    ]
    (panel,) = plots._panels(a_result(benchmark="context", steps=cases))
    assert panel["x"] == [128, 1024, 8000]
    assert panel["lines"][0]["y"] == [20, 20, 20]


def test_a_load_is_drawn_over_its_streams() -> None:
    load = a_load(tokens=100, seconds=5.0)
    loads = [a_serve_case([load], [step(8, [100], [100])], concurrency=n) for n in (8, 1, 16)]
    (panel,) = plots._panels(a_result(benchmark="serve", steps=[], serve=loads))
    assert panel["x"] == [1, 8, 16]
    (line,) = panel["lines"]
    assert (line["label"], line["y"]) == (OURS, [20, 20, 20])


def test_two_points_make_no_plot() -> None:
    few = [step(1, [50], [100]), step(2, [50], [100])]
    assert plots.name(a_result(steps=few)) is None
    assert plots.name(a_result(benchmark="build", steps=[])) is None
