"""What an operator chooses about the engine, and the one place where the defaults stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shark_llm.errors import UsageError

SchedulingPolicy = Literal["fcfs", "lpm"]
SCHEDULING_POLICIES: tuple[SchedulingPolicy, ...] = ("fcfs", "lpm")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Limits and policies of the engine. Raises `UsageError` for values that cannot work."""

    max_num_seqs: int = 16
    """Most requests that run (hold pages) at once."""
    max_num_batched_tokens: int = 512
    """Token budget of one step: running decodes first, the rest for prefill chunks."""
    max_num_queued_requests: int = 1024
    """Requests that may be accepted beyond `max_num_seqs`; more are refused with status 503."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together. None = what the module and its pages allow."""
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    """fcfs: in order of arrival. lpm: longest cached prefix first."""
    max_overtakes: int = 32
    """The bound on waiting: no more later arrivals than this are admitted before a request."""
    max_consecutive_failures: int = 3
    """When this many forwards in a row have raised, the engine gives up."""
    integrity_check_interval: int = 256
    """Steps between two full checks of page ownership (a cheap count is made at every step)."""

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_queued_requests",
            "max_consecutive_failures",
            "integrity_check_interval",
        ):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1")
        if self.max_overtakes < 0:
            raise UsageError(f"max_overtakes is {self.max_overtakes}; it must be at least 0")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise UsageError(f"max_model_len is {self.max_model_len}; it must be at least 1")
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise UsageError(
                f"scheduling_policy is {self.scheduling_policy!r}; "
                f"it must be one of {', '.join(SCHEDULING_POLICIES)}"
            )
