"""Streams end cleanly, fail loudly, and stop when nobody reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from serve_harness import FakeServer, events_of, fake_server, wait_for
from shark_llm.engine.settings import EngineSettings
from shark_llm.server import sse
from shark_llm.server.errors import error_body


def test_an_event_is_one_line() -> None:
    body = error_body("a\nb\u2028c", status=400)
    raw = sse.event(body)
    assert raw.count(b"\n") == 2
    assert raw.endswith(b"\n\n")
    assert json.loads(raw.removeprefix(b"data: "))["error"]["message"] == "a\nb\u2028c"


def run_stream(
    events: AsyncGenerator[bytes, None], *, leave_after: int | None = None, stall: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    """Drive an EventStream by hand; the client leaves after so many chunks."""
    sent: list[dict[str, Any]] = []
    closed: list[str] = []

    async def drive() -> None:
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(dict(message))
            if leave_after is not None and len(sent) > leave_after:
                left.set()
                if stall:
                    await asyncio.Event().wait()

        stream = sse.EventStream(events, on_close=lambda: closed.append("closed"))
        await asyncio.wait_for(stream({"type": "http"}, receive, send), timeout=5)

    asyncio.run(drive())
    return sent, closed


async def count(ended: list[str], limit: int = 10**6) -> AsyncGenerator[bytes, None]:
    try:
        for number in range(limit):
            yield b"%d" % number
            await asyncio.sleep(0)
    finally:
        ended.append("ended")


def test_a_stream_that_ends_is_closed_once() -> None:
    ended: list[str] = []
    sent, closed = run_stream(count(ended, 3))
    assert [message.get("body") for message in sent] == [None, b"0", b"1", b"2", b""]
    assert sent[-1]["more_body"] is False
    assert (ended, closed) == (["ended"], ["closed"])


@pytest.mark.parametrize("stall", [False, True])
def test_a_reader_that_leaves_ends_the_stream(stall: bool) -> None:
    """D15: also while a send to it is stuck."""
    ended: list[str] = []
    sent, closed = run_stream(count(ended), leave_after=3, stall=stall)
    assert len(sent) < 20
    assert (ended, closed) == (["ended"], ["closed"])


def test_work_is_cancelled_when_the_client_leaves() -> None:
    cancelled: list[bool] = []

    async def drive() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(True)

        with pytest.raises(ClientDisconnect):
            await sse.unless_disconnected(receive, work())

    asyncio.run(drive())
    assert cancelled == [True]


def call(
    server: FakeServer,
    path: str,
    body: dict[str, Any],
    *,
    leave: Callable[[int, asyncio.Event], Any],
) -> list[dict[str, Any]]:
    """POST through the bare ASGI interface; `leave` gets each message number and the exit."""
    sent: list[dict[str, Any]] = []
    raw = json.dumps(body).encode()

    async def drive() -> None:
        left = asyncio.Event()
        pending = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if pending:
                leave(0, left)
                return pending.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(dict(message))
            leave(len(sent), left)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
            "http_version": "1.1",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        await asyncio.wait_for(server.app(scope, receive, send), timeout=10)

    asyncio.run(drive())
    return sent


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(path: str, stream: bool) -> None:
    """D15: in decode (streaming, after a few chunks) and whole (while it runs)."""
    with fake_server(step_seconds=0.002, max_model_len=4096, num_pages=512) as server:
        body = {
            "prompt": "p",
            "text": "p",
            "messages": [{"role": "user", "content": "p"}],
            "max_tokens": 3000,
            "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
            "ignore_eos": True,
            "stream": stream,
        }

        def leave(number: int, left: asyncio.Event) -> None:
            if number == 4:
                left.set()
            if number == 0 and not stream:
                asyncio.get_running_loop().call_later(0.1, left.set)

        call(server, path, body, leave=leave)
        wait_for(lambda: server.engine.stats().running == 0, timeout=2)
        assert server.engine.stats().generation_tokens < 2000
        server.wait_idle()
        assert "abort" in str(server.metrics.render())


def test_leaving_while_queued_frees_the_place() -> None:
    """D15: the request never ran; the one before it is not disturbed."""
    settings = EngineSettings(max_num_seqs=1)
    with fake_server({"p": "x" * 300}, engine_settings=settings, step_seconds=0.002) as server:

        def leave(number: int, left: asyncio.Event) -> None:
            if number == 0:
                asyncio.get_running_loop().call_later(0.05, left.set)

        body = {"prompt": ["p", "p", "p"], "temperature": 0}
        call(server, "/v1/completions", body, leave=leave)
        server.wait_idle()
        assert server.engine.stats().requests_finished.get("abort", 0) == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_fault_in_mid_stream_is_an_error_event(path: str) -> None:
    """D17: at token 5 the device fails: an error object, no finish_reason, no [DONE]."""

    def fail(index: int, phase: Any, rows: Any) -> None:
        if index == 5:
            raise RuntimeError("hip error 719 in /secret")

    with fake_server({"p": "x" * 300}, on_forward=fail) as server:
        body = {
            "prompt": "p",
            "text": "p",
            "messages": [{"role": "user", "content": "p"}],
            "stream": True,
        }
        response = server.post(path, body)
        assert response.status_code == 200
        events = events_of(response.text, done=False)
        assert events[-1]["error"]["type"] == "server_error"
        assert "secret" not in response.text
        for event in events[:-1]:
            for choice in event.get("choices", []):
                assert choice["finish_reason"] is None
        assert server.complete("p", max_tokens=2)["choices"][0]["text"] == "xx"
        server.wait_idle()


def test_a_stalled_reader_is_cut_off() -> None:
    """The backlog is bounded: beyond it the engine request is aborted and the stream ends."""
    settings = {"max_backlog_tokens": 20}
    with fake_server(
        settings=settings, step_seconds=0.001, max_model_len=4096, num_pages=512
    ) as server:
        body = {"prompt": "p", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        sent: list[bytes] = []

        async def drive() -> None:
            pending = [{"type": "http.request", "body": json.dumps(body).encode()}]
            stay = asyncio.Event()

            async def receive() -> dict[str, Any]:
                if pending:
                    return pending.pop()
                await stay.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message.get("body", b""))
                if len(sent) == 3:
                    await asyncio.sleep(0.3)  # does not read for a while

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/completions",
                "query_string": b"",
                "root_path": "",
                "headers": [],
                "asgi": {"version": "3.0", "spec_version": "2.3"},
            }
            await asyncio.wait_for(server.app(scope, receive, send), timeout=10)

        asyncio.run(drive())
        last = [part for part in sent if part][-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "slow_reader"
        assert server.engine.stats().generation_tokens < 1000
        server.wait_idle()


def test_a_request_that_takes_too_long_is_a_504() -> None:
    settings = {"request_timeout": 0.1}
    with fake_server(settings=settings, step_seconds=0.01, max_model_len=4096) as server:
        body = {"prompt": "p", "max_tokens": 2000, "ignore_eos": True}
        response = server.post("/v1/completions", body)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"
        events = events_of(
            server.post("/v1/completions", {**body, "stream": True}).text, done=False
        )
        assert events[-1]["error"]["code"] == "timeout"
        server.wait_idle()


@pytest.mark.parametrize("name", ["answer id", "request_id", "header"])
def test_abort_by_any_of_its_names(name: str) -> None:
    """The answer finishes with reason `abort`, and has what was made until then."""
    with fake_server(step_seconds=0.002, max_model_len=4096, num_pages=512) as server:
        body = {"prompt": "p", "max_tokens": 3000, "ignore_eos": True, "request_id": "mine"}

        async def drive() -> tuple[Any, Any]:
            transport = httpx.ASGITransport(app=server.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
                headers = {"x-request-id": "theirs"}
                running = asyncio.create_task(
                    client.post("/v1/completions", json=body, headers=headers)
                )
                while server.engine.stats().generation_tokens < 5:
                    await asyncio.sleep(0.01)
                own = next(key for key in server.state._active if key.startswith("cmpl-"))
                chosen = {"answer id": own, "request_id": "mine", "header": "theirs"}[name]
                aborted = await client.post("/abort", json={"request_id": chosen})
                return aborted, await asyncio.wait_for(running, 5)

        aborted, answer = asyncio.run(drive())
        assert aborted.json() == {"aborted": 1}
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
        assert answer.json()["usage"]["completion_tokens"] >= 5
        server.wait_idle()
