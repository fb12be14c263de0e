"""A result as Markdown. Times are medians; a ratio above 1 says that this project is faster."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.results import (
    OURS,
    LoadSeries,
    Result,
    Round,
    ServeCase,
    StepCase,
    Timing,
    paired_ratios,
)

NOISY = 0.1
"""When others take more of the machine than this, a run says so."""


def section(result: Result) -> str:
    """The facts of a run and all its tables."""
    parts = [facts(result)]
    if result.steps:
        parts.append(step_table(result))
    if result.serve:
        parts += [serve_table(result), share_table(result)]
    if result.timings:
        parts.append(timing_table(result.timings))
    return "\n\n".join(parts) + "\n"


def facts(result: Result) -> str:
    """Where, when and with what, as one paragraph."""
    machine = result.machine
    kind = "virtual machine" if machine.virtual else "machine"
    caches = ", ".join(f"{name} {size}" for name, size in machine.caches.items())
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    worst = _worst_others(result)
    lines = [
        f"`{result.command}`",
        "",
        f"{result.model}, {result.dtype}; commit {result.commit}; {result.started}.",
        f"{machine.cpu} ({machine.family}), {kind} with {machine.cores} cores "
        f"({machine.threads} threads), {machine.memory_gib} GiB, {caches}, {machine.kernel}; "
        f"instruction sets: {' '.join(machine.features) or 'unknown'}.",
        f"{versions}.",
        f"Load average before the run: {machine.load[0]}.",
    ]
    if worst is not None:
        share = f"at most {_percent(worst)} of the machine in any round"
        lines.append(f"Other processes and guests took {share}.")
    lines += [
        f"Memory bandwidth, {band.cores} {_cores(band.cores)}: triad "
        f"{statistics.median(band.triad):.1f}, reading {statistics.median(band.read):.1f} GB/s "
        f"(medians of {len(band.triad)}); the best, {band.best:.1f}, makes the floor."
        for band in result.bandwidth
    ]
    if worst is not None and worst > NOISY:
        lines.append("**This run was disturbed: read its ratios with care, and measure again.**")
    return "\n".join(lines)


def step_table(result: Result) -> str:
    """decode, prefill and context: all sides, our ratios, and the memory's floor for decode."""
    decode = any(case.phase == "decode" for case in result.steps)
    names = [OURS, *dict.fromkeys(peer for case in result.steps for peer in case.peers)]
    header = ["cores", "batch", "context" if decode else "tokens"]
    header += [f"{OURS} tok/s"]
    for peer in names[1:]:
        header += [f"{peer} tok/s", f"ratio to {peer} (range)"]
    header += [f"x floor, {name}" for name in names] if decode else []
    header += [*(f"wall / CPU ms, {name}" for name in names), "others"]
    rows = []
    for case in result.steps:
        sides = [case.side(name) for name in names]
        row = [str(case.cores), str(case.batch), str(case.context)]
        row += [_rate(case, sides[0].seconds)]
        for side in sides[1:]:
            row += [_rate(case, side.seconds), _ratio(case.ratios(side.side))]
        if decode:
            row += [over_floor(result, case, side.seconds) for side in sides]
        row += [f"{s.seconds * 1e3:.2f} / {s.cpu_seconds * 1e3:.2f}" for s in sides]
        rows.append([*row, _percent(max(side.others for side in sides))])
    return table(header, rows)


def over_floor(result: Result, case: StepCase, seconds: float) -> str:
    """A step's time as a multiple of the time that its reads alone would take."""
    bandwidth = result.bandwidth_of(case.cores)
    if bandwidth is None:
        return "-"
    return f"{seconds / (case.bytes_read / (bandwidth * 1e9)):.2f}"


def serve_table(result: Result) -> str:
    """What each server gave at each concurrency."""
    header = ["cores", "streams", "side", "output tok/s", "TTFT p50 / max ms", "ms per token"]
    header += ["event gap p50 / p95 ms", "CPU s per 1000 tokens", "ratio (range)", "others"]
    rows = []
    for case in result.serve:
        ours = case.ours
        for series in case.series:
            ratios = "" if series is ours else _ratio(paired_ratios(_rates(ours), _rates(series)))
            rows.append([str(case.cores), str(case.concurrency), *_served(series), ratios])
            rows[-1].append(_percent(max(r.others for r in series.rounds)))
    if all(len(case.series) == 1 for case in result.serve):
        header, rows = _without(-2, header), [_without(-2, row) for row in rows]
    return table(header, rows)


def share_table(result: Result) -> str:
    """Our server beside its own module: what the engine and HTTP cost."""
    header = ["cores", "streams", "server tok/s", "module decode tok/s", "server / decode (range)"]
    header += ["between prefills / decode (range)", "server / same work by the module (range)"]
    header += ["device waits"]
    rows = []
    for case in result.serve:
        ours = case.ours
        decode, decodes = case.module_rounds("decode")
        module = [decode.batch / r.seconds for r in decodes]
        waits = [r.device_wait for r in ours.rounds if r.device_wait is not None]
        steady = [case.concurrency / (r.gap_p50_ms / 1e3) for r in ours.rounds]
        rows.append(
            [
                str(case.cores),
                str(case.concurrency),
                _median(_rates(ours), "{:.1f}"),
                _median(module, "{:.1f}"),
                _ratio(paired_ratios(_rates(ours), module)),
                _ratio(paired_ratios(steady, module)),
                _ratio(paired_ratios(_rates(ours), same_work_rates(case))),
                _median([100 * wait for wait in waits], "{:.1f} %") if waits else "",
            ]
        )
    if not any(row[-1] for row in rows):  # results that were taken before it was measured
        header, rows = header[:-1], [row[:-1] for row in rows]
    return table(header, rows)


def same_work_rates(case: ServeCase) -> list[float]:
    """Output tok/s, round by round, if the module's steps were all there is to do.

    A prompt's first token comes from its prefill, the others of its answer from decode steps, of
    which more streams than the largest batch has rows need several for a token each.
    """
    decode, decodes = case.module_rounds("decode")
    prefill, prefills = case.module_rounds("prefill")
    batches = case.concurrency / prefill.batch
    passes = -(-case.concurrency // decode.batch)
    return [
        case.concurrency
        * case.max_tokens
        / ((case.max_tokens - 1) * passes * step.seconds + batches * prompt.seconds)
        for step, prompt in zip(decodes, prefills, strict=True)
    ]


def timing_table(timings: Sequence[Timing]) -> str:
    """Builds, starts, arrivals, prefixes: the median of each quantity and its range."""
    names = list(dict.fromkeys(name for timing in timings for name in timing.values))
    header = ["quantity", *(f"{t.name}, {t.cores} {_cores(t.cores)}" for t in timings)]
    rows = [
        [name, *(_spread(t.values[name]) if name in t.values else "-" for t in timings)]
        for name in names
    ]
    return table(header, rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _without(column: int, row: list[str]) -> list[str]:
    return row[:column] + row[column:][1:]


def _served(series: LoadSeries) -> list[str]:
    rounds = series.rounds
    ttft = [value for r in rounds for value in r.ttft_ms]
    tpot = [value for r in rounds for value in r.tpot_ms]
    gaps = [_median([get(r) for r in rounds], "{:.1f}") for get in _GAPS]
    cpu = sum(r.server_cpu_s for r in rounds) / sum(r.output_tokens for r in rounds) * 1000
    return [
        f"{series.side}, {series.form}" if series.form else series.side,
        _median(_rates(series), "{:.1f}"),
        f"{statistics.median(ttft):.0f} / {max(ttft):.0f}",
        _median(tpot, "{:.1f}"),
        " / ".join(gaps),
        f"{cpu:.1f}",
    ]


_GAPS: tuple[Callable[..., float], ...] = (lambda r: r.gap_p50_ms, lambda r: r.gap_p95_ms)


def _worst_others(result: Result) -> float | None:
    steps = [*result.steps, *(case for serve in result.serve for case in serve.module)]
    rounds: list[Round] = [r for case in steps for s in case.series for r in s.rounds]
    loads = [r for case in result.serve for s in case.series for r in s.rounds]
    return max([*(r.others for r in rounds), *(r.others for r in loads)], default=None)


def _rates(series: LoadSeries) -> list[float]:
    return [r.rate for r in series.rounds]


def _rate(case: StepCase, seconds: float) -> str:
    return f"{case.tokens / seconds:.1f}"


def _ratio(ratios: Sequence[float]) -> str:
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} - {max(ratios):.2f})"


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


def _median(values: Sequence[float], form: str) -> str:
    return form.format(statistics.median(values))


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _cores(count: int) -> str:
    return "core" if count == 1 else "cores"
