"""/metrics has the names that dashboards read, and numbers that add up."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from serve_harness import MODEL, fake_server
from shark_llm.server.metrics import Metrics

GAUGES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "engine_device_wait_perc",
}
COUNTERS = {
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "request_success",
    "engine_steps",
    "engine_step_seconds",
    "engine_forward_seconds",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
}


def read(text: str) -> dict[tuple[str, str], float]:
    """(sample name, finished_reason or le or '') -> value; all are labelled with the model."""
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            extra = sample.labels.get("finished_reason") or sample.labels.get("le") or ""
            values[(sample.name, extra)] = sample.value
    return values


def test_names_and_kinds() -> None:
    with fake_server({"p": "abc"}) as server:
        server.complete("p")
        text = server.get("/metrics").text
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            assert kinds[f"shark_{name}"] == kind, name


def test_numbers_add_up_with_what_clients_were_told() -> None:
    with fake_server({"p": "x" * 20}) as server:
        answers = [
            server.complete("p"),
            server.complete("p", max_tokens=4),
            server.complete("p", stop="xxx"),
            server.complete(["p", "p"], n=2, max_tokens=3),
        ]
        server.wait_idle()
        values = read(server.get("/metrics").text)
    completion = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert values[("shark_request_success_total", "stop")] == 2
    assert values[("shark_request_success_total", "length")] == 5
    assert values[("shark_request_generation_tokens_sum", "")] == completion
    assert values[("shark_request_generation_tokens_count", "")] == 7
    assert values[("shark_request_prompt_tokens_sum", "")] == 7 * 2
    assert values[("shark_prompt_tokens_total", "")] == 7 * 2
    # A stop string is seen a step or so after the engine made its last token.
    assert 0 <= values[("shark_generation_tokens_total", "")] - completion <= 20
    assert values[("shark_time_to_first_token_seconds_count", "")] == 7
    assert values[("shark_e2e_request_latency_seconds_count", "")] == 7
    assert values[("shark_request_queue_time_seconds_count", "")] == 7
    assert values[("shark_num_requests_running", "")] == 0
    assert values[("shark_kv_cache_usage_perc", "")] == 0


def test_two_apps_do_not_share_metrics() -> None:
    one, two = Metrics("a"), Metrics("b")
    one.finished("stop")
    assert b"finished_reason" in one.render()
    assert b"finished_reason" not in two.render()


def test_the_share_of_time_in_which_the_device_waits() -> None:
    with fake_server({"p": "x" * 20}, step_seconds=0.002) as server:
        server.complete("p")
        server.wait_idle()
        values = read(server.get("/metrics").text)
    busy = values[("shark_engine_step_seconds_total", "")]
    worked = values[("shark_engine_forward_seconds_total", "")]
    assert 0.002 * values[("shark_engine_steps_total", "")] <= worked < busy
    assert values[("shark_engine_device_wait_perc", "")] == 1 - worked / busy
