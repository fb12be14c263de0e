"""The settings of the server: the one place where their defaults stand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the server listens, whom it lets in, and how much it takes.

    Sizes are in bytes, times in seconds.
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0 = any free port
    served_model_name: str
    api_keys: tuple[str, ...] = ()  # empty = open to everybody
    cors_allow_origins: tuple[str, ...] = ()  # empty = no CORS headers
    max_body_bytes: int = 16 * 1024 * 1024
    max_concurrent_requests: int = 2048  # HTTP requests that are open at once
    max_choices: int = 1024  # prompts x n of one call
    max_backlog_tokens: int = 8192  # tokens kept for a reader that stalls, per choice
    request_timeout: float | None = None  # None = as long as it takes
    shutdown_timeout: float = 30.0
    stall_timeout: float = 30.0  # a step longer than this makes /health 503 until it ends
    dead_linger: float = 2.0  # how long a dead engine's server still answers 503 before it exits
    debug: bool = False  # tracebacks in the log
