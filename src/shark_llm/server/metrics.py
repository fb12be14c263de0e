"""Prometheus metrics: vLLM's names with the prefix `shark_`: its dashboards need one replace.

Counters and gauges of the engine are read from its snapshot at scrape time, never counted twice.
Histograms are observed where the event loop sees the events. Each app has its own registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shark_llm.engine.stats import EngineStats

# Seconds. Tokens come every 1 ms .. 1 s, first tokens after 1 ms .. 1 min, requests take minutes.
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
_TOKEN_COUNTS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000,
)  # fmt: skip


class Metrics:
    """The metrics of one server. `model_name` labels all of them."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._collector = _EngineCollector(model_name)
        self.registry.register(self._collector)
        self._request_success = Counter(
            "shark_request_success",
            "Requests that were answered, by how they ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.time_to_first_token = self._histogram(
            "shark_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            _FIRST_TOKEN_SECONDS,
        )
        self.inter_token_latency = self._histogram(
            "shark_inter_token_latency_seconds",
            "Between two tokens of one request.",
            _TOKEN_SECONDS,
        )
        self.e2e_request_latency = self._histogram(
            "shark_e2e_request_latency_seconds",
            "From the arrival of a request to its end.",
            _REQUEST_SECONDS,
        )
        self.request_queue_time = self._histogram(
            "shark_request_queue_time_seconds",
            "From the arrival of a request to its first pages.",
            _REQUEST_SECONDS,
        )
        self.request_prefill_time = self._histogram(
            "shark_request_prefill_time_seconds",
            "From the first pages of a request to its first token.",
            _REQUEST_SECONDS,
        )
        self.request_decode_time = self._histogram(
            "shark_request_decode_time_seconds",
            "From the first token of a request to its end.",
            _REQUEST_SECONDS,
        )
        self.request_prompt_tokens = self._histogram(
            "shark_request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_COUNTS
        )
        self.request_generation_tokens = self._histogram(
            "shark_request_generation_tokens", "Generated tokens of a request.", _TOKEN_COUNTS
        )

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Read the engine's snapshot at every scrape from now on."""
        self._collector.stats = stats

    def finished(self, reason: str) -> None:
        """Count one choice that ended: stop, length, abort or error."""
        self._request_success.labels(self._model_name, reason).inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(
            name, text, ["model_name"], buckets=tuple(buckets), registry=self.registry
        )
        return family.labels(self._model_name)


class _EngineCollector(Collector):
    """The engine's snapshot as metric families."""

    def __init__(self, model_name: str) -> None:
        self._labels = [model_name]
        self.stats: Callable[[], EngineStats] | None = None

    def collect(self) -> Iterable[Metric]:
        if self.stats is None:
            return
        stats = self.stats()
        yield self._gauge(
            "engine_healthy", "1 while new requests are taken, else 0.", stats.healthy
        )
        yield self._gauge("num_requests_running", "Requests that hold pages.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the KV pages that running requests use, 0..1.",
            stats.kv_cache_usage,
        )
        yield self._gauge(
            "kv_cache_cached_pages", "Pages held by the prefix cache.", stats.pages_cached
        )
        yield self._gauge("kv_cache_free_pages", "Pages that hold nothing.", stats.pages_free)
        yield self._counter("prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._counter(
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        )
        yield self._counter(
            "prefix_cache_hits", "Prompt tokens found there.", stats.prefix_cache_hits
        )
        yield self._counter(
            "num_preemptions", "Requests put back for want of pages.", stats.preemptions
        )
        yield self._counter(
            "forward_failures", "Steps in which the device failed.", stats.forward_failures
        )
        yield self._counter("engine_steps", "Steps of the engine.", stats.steps)
        yield self._counter(
            "engine_step_seconds", "Time in which there was something to run.", stats.step_seconds
        )
        yield self._counter(
            "engine_forward_seconds", "Time in which the device worked.", stats.forward_seconds
        )
        yield self._gauge(
            "engine_device_wait_perc",
            "Share of engine_step_seconds in which the device waited for the host, 0..1.",
            stats.device_wait,
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"shark_{name}", text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"shark_{name}", text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family
