"""A snapshot of the engine for /metrics and the status page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """One consistent view, taken between two steps. Counters only grow; seconds are wall time.

    `pages_free + pages_cached + pages_held == pages_total` holds in every snapshot. A page of the
    prefix cache counts as cached also while running requests read it.
    """

    healthy: bool = True
    """False: the engine is dead, or found its memory accounting broken and starts nothing new."""
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    """Pages that can hold tokens; the scratch page is not among them."""
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    """Pages that belong to one running request alone."""
    pages_evictable: int = 0
    """Cached pages that no running request reads."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens found in it, of which no key or value was computed again."""
    preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, cached ones included, each counted once."""
    generation_tokens: int = 0
    requests_accepted: int = 0
    requests_finished: Mapping[str, int] = field(default_factory=dict)
    """By finish_reason, and "error"."""
    forward_failures: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    """Time in which there was something to run. An idle engine does not add to it."""
    forward_seconds: float = 0.0
    """The part of `step_seconds` in which the device worked; in the rest it waited for the host."""
    decode_batches: Mapping[int, int] = field(default_factory=dict)
    """Rows of a decode forward -> how many such forwards."""
    prefill_batches: Mapping[int, int] = field(default_factory=dict)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pages that running requests use, 0..1; what could be evicted is not used."""
        if not self.pages_total:
            return 0.0
        return (self.pages_total - self.pages_free - self.pages_evictable) / self.pages_total

    @property
    def device_wait(self) -> float:
        """The share of `step_seconds` in which the device waited for the host, 0 to 1."""
        return max(0.0, 1 - self.forward_seconds / self.step_seconds) if self.step_seconds else 0.0
