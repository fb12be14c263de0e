"""GET / and GET /status: what the server does now, for the eye and for programs."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from shark_llm import __version__
from shark_llm.engine.stats import EngineStats
from shark_llm.server.context import Context
from shark_llm.server.status import Status, status_of


class ServerStatus(BaseModel):
    """Gauges as of the last step; counters since the start. The engine's are null until it runs."""

    model: str
    version: str
    status: Status
    phase: str
    percent: float | None = None
    max_model_len: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_cache_usage: float | None = None
    """Share of the KV pages that running requests use, 0..1."""
    kv_cache_cached: float | None = None
    """Share of the KV pages that the prefix cache holds, 0..1."""
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    preemptions: int | None = None
    requests_finished: Mapping[str, int] | None = None


async def status(context: Context, request: Request) -> Response:
    """The numbers of the page, at any phase of the server's life."""
    state = context.state
    body = ServerStatus(
        model=context.settings.served_model_name,
        version=__version__,
        status=status_of(state),
        phase=state.detail,
        percent=state.percent,
        **({} if state.served is None else _engine_numbers(state.served.engine.stats())),
        max_model_len=None if state.served is None else state.served.max_model_len,
    )
    headers = {"Cache-Control": "no-store"}
    return Response(body.model_dump_json(), headers=headers, media_type="application/json")


async def page(context: Context, request: Request) -> Response:
    """The page. It holds no data: its script asks /status, with a key if that wants one."""
    html, policy = _page()
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(html, headers=headers, media_type="text/html")


def _engine_numbers(stats: EngineStats) -> dict[str, Any]:
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_cache_usage": stats.kv_cache_usage,
        "kv_cache_cached": stats.pages_cached / stats.pages_total if stats.pages_total else 0.0,
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "preemptions": stats.preemptions,
        "requests_finished": stats.requests_finished,
    }


@lru_cache(maxsize=1)
def _page() -> tuple[str, str]:
    """The HTML, and a policy that lets its own style and script run and nothing else load."""
    html = files("shark_llm.server").joinpath("status_page.html").read_text(encoding="utf-8")
    hashes = {}
    for tag in ("style", "script"):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        hashes[tag] = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; style-src {hashes['style']}; script-src {hashes['script']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return html, policy
