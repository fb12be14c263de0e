"""The sides of a load: what a round keeps of its answers, and which form of a peer takes part."""

from __future__ import annotations

from dataclasses import dataclass

from benchmark_samples import OURS, PEER, LoadRound, a_load, load, serving, sides


@dataclass(frozen=True)
class Form:
    name: str
    form: str

    def round(self, asked: load.Load) -> LoadRound:
        raise AssertionError("not asked in these tests")


def test_a_round_keeps_times_in_milliseconds() -> None:
    answers = [
        load.Answer(output_tokens=3, sent=1.0, events=(1.1, 1.2, 1.4)),
        load.Answer(output_tokens=1, sent=1.0, events=(1.5,)),
    ]
    found = sides.load_round(answers, 2.0, cpu=1.5, others=0.0, wait=0.25)
    assert found.rate == 2.0
    assert found.ttft_ms == [100.0, 500.0]
    assert found.tpot_ms == [150.0, 0.0]
    assert (found.gap_p50_ms, found.gap_p95_ms) == (100.0, 200.0)
    assert (found.server_cpu_s, found.device_wait) == (1.5, 0.25)


def test_answers_of_one_token_have_no_gaps() -> None:
    """And others that took less than nothing, by two clocks, took nothing."""
    found = sides.load_round(
        [load.Answer(output_tokens=1, sent=0.0, events=(0.5,))], 1.0, cpu=1.0, others=-0.1
    )
    assert (found.gap_p50_ms, found.others, found.device_wait) == (0.0, 0.0, None)


def test_the_fastest_form_of_each_side_takes_part() -> None:
    ours, one, each = Form(OURS, ""), Form(PEER, "one KV cache"), Form(PEER, "each")
    fast, slow = a_load(tokens=200, seconds=1), a_load(tokens=100, seconds=1)
    assert serving.fastest_forms({ours: [slow], one: [slow], each: [fast]}) == [ours, each]
    assert serving.fastest_forms({ours: [slow], one: [fast], each: [slow]}) == [ours, one]
    assert serving.fastest_forms({ours: [slow]}) == [ours]
