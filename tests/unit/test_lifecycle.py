"""The life of the server on a real loopback port: loading, ready, draining, dead."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from serve_harness import events_of, parts, real_server, wait_for
from shark_llm.engine.settings import EngineSettings
from shark_llm.errors import SharkError, UsageError
from shark_llm.server.lifecycle import Life, bind, make_first_token, url_of
from shark_llm.server.settings import ServerSettings

LONG = {"p": "x" * 200}
STREAM = {"prompt": "p", "temperature": 0, "stream": True, "max_tokens": 200}


def test_health_is_503_from_the_start_and_200_when_a_token_can_be_made() -> None:
    """F02: a connection is accepted at once; the phase is told; nothing is answered early."""
    gate = threading.Event()
    with real_server({"p": "abc"}, wait_ready=False, before_loaded=gate.wait) as server:
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        wait_for(lambda: httpx.get(f"{server.url}/health").json()["phase"] == "loading the fake")
        early = httpx.post(f"{server.url}/v1/completions", json={"prompt": "p"})
        assert early.status_code == 503
        assert early.headers["retry-after"]
        gate.set()
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "p", "temperature": 0})
        assert answer.json()["choices"][0]["text"] == "abc"
        assert server.stop() == 0


def test_ready_means_that_a_token_was_made() -> None:
    """F02: a model whose first step fails never becomes ready; the loader's error comes out."""

    def fail(index: int, phase: Any, rows: Any) -> None:
        raise RuntimeError("no device")

    served, runner, engine = parts(on_forward=fail)
    with pytest.raises(SharkError, match="cannot make a token"):
        make_first_token(served.engine)
    engine.stop()
    assert runner.closed


def test_ready_means_that_both_phases_ran() -> None:
    """F02: prompts of one token run as decode rows, so a broken prefill was found by a client."""
    phases: list[str] = []
    served, _, engine = parts(on_forward=lambda index, phase, rows: phases.append(phase))
    make_first_token(served.engine)
    engine.stop()
    assert phases == ["prefill", "decode"]


def test_the_shortest_context_can_be_served() -> None:
    served, _, engine = parts(engine_settings=EngineSettings(max_model_len=2))
    make_first_token(served.engine)
    engine.stop()


def test_the_cause_of_death_is_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """/health is open to everybody, and what a device says names files."""

    def fail(index: int, phase: Any, rows: Any) -> None:
        if index > 1:
            raise RuntimeError("driver/secret/queue.c:719: hip error\n  at secret/frame")

    settings = {"dead_linger": 2.0}
    engine_settings = EngineSettings(max_consecutive_failures=1)
    with real_server(
        LONG, settings=settings, engine_settings=engine_settings, on_forward=fail
    ) as server:
        url = f"{server.url}/v1/completions"
        answers = [httpx.post(url, json={"prompt": "p"})]
        wait_for(lambda: server.life.state.phase == "dead")
        answers += [httpx.post(url, json={"prompt": "p"}), httpx.get(f"{server.url}/health")]
        assert server.join() == 1
    assert [answer.status_code for answer in answers] == [500, 503, 503]
    assert not any("secret" in answer.text or "719" in answer.text for answer in answers)
    assert "in a row, last with RuntimeError" in answers[2].json()["phase"]
    assert "queue.c:719" in caplog.text


def test_an_engine_that_dies_while_draining_is_exit_code_1() -> None:
    """F02: it was 0, as if every stream had been finished."""
    broken = threading.Event()

    def fail(index: int, phase: Any, rows: Any) -> None:
        if broken.is_set():
            raise RuntimeError("hip error 719")

    with (
        real_server(
            LONG,
            engine_settings=EngineSettings(max_consecutive_failures=1),
            on_forward=fail,
            step_seconds=0.02,
        ) as server,
        httpx.Client(timeout=20) as client,
    ):
        with client.stream("POST", f"{server.url}/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            text = [next(lines) for _ in range(5)]
            server.request_stop()
            wait_for(lambda: server.life.state.phase == "draining")
            broken.set()
            text += list(lines)
        assert "error" in events_of("\n".join(text), done=False)[-1]
        assert server.join() == 1


def test_a_loaders_error_ends_the_life() -> None:
    def load(report: Any) -> Any:
        raise SharkError("the bundle is broken")

    life = Life(ServerSettings(served_model_name="x"), bind("127.0.0.1", 0), load)
    with pytest.raises(SharkError, match="the bundle is broken"):
        asyncio.run(life.run(handle_signals=False))


def test_draining_finishes_streams_and_takes_nothing_new() -> None:
    """F01: the stream goes on to its end, new requests and /health are 503, the exit code is 0."""
    with real_server(LONG, step_seconds=0.005) as server, httpx.Client(timeout=20) as client:
        url = f"{server.url}/v1/completions"
        with client.stream("POST", url, json=STREAM) as response:
            lines = response.iter_lines()
            text = [next(lines) for _ in range(20)]
            server.request_stop()
            wait_for(lambda: server.life.state.phase == "draining")
            new = httpx.post(url, json={"prompt": "p"})
            assert new.status_code == 503
            assert new.json()["error"]["code"] == "draining"
            assert httpx.get(f"{server.url}/health").json()["status"] == "draining"
            text += list(lines)
        events = events_of("\n".join(text))
        joined = "".join(choice["text"] for event in events for choice in event["choices"])
        assert joined == "x" * 200
        assert server.join() == 0
        assert server.runner.closed


def test_what_does_not_finish_in_time_is_aborted() -> None:
    """F01: shutdown_timeout is kept, and the stream still gets an end."""
    settings = {"shutdown_timeout": 0.3}
    with real_server(LONG, step_seconds=0.05, settings=settings) as server:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=STREAM, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            started = time.monotonic()
            server.request_stop()
            events = events_of("\n".join(["data: {}", "", *list(lines)[1:]]))
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        assert server.join() == 0
        assert time.monotonic() - started < 3


def test_a_dead_engine_is_503_everywhere_and_exit_code_1() -> None:
    """F02: after too many failures in a row the engine is dead; open streams get one error."""
    broken = threading.Event()

    def fail(index: int, phase: Any, rows: Any) -> None:
        if broken.is_set():
            raise RuntimeError("hip error 719")

    settings = {"dead_linger": 0.5}
    engine_settings = EngineSettings(max_consecutive_failures=1)
    with (
        real_server(
            LONG,
            settings=settings,
            engine_settings=engine_settings,
            on_forward=fail,
            step_seconds=0.01,
        ) as server,
        httpx.Client(timeout=20) as client,
    ):
        url = f"{server.url}/v1/completions"
        with client.stream("POST", url, json=STREAM) as response:
            lines = response.iter_lines()
            text = [next(lines) for _ in range(5)]
            broken.set()
            text += list(lines)
        events = events_of("\n".join(text), done=False)
        assert [event for event in events if "error" in event] == events[-1:]
        wait_for(lambda: server.life.state.phase == "dead")
        assert httpx.get(f"{server.url}/health").json()["status"] == "dead"
        refused = httpx.post(url, json={"prompt": "p"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "dead"
        assert server.join() == 1


def test_a_step_that_hangs_makes_the_server_unhealthy_until_it_ends() -> None:
    """F02: a blocked step."""
    gate = threading.Event()
    hang = threading.Event()

    def block(index: int, phase: Any, rows: Any) -> None:
        if hang.is_set():
            gate.wait(10)

    settings = {"stall_timeout": 0.3}
    with real_server({"p": "abc"}, settings=settings, on_forward=block) as server:
        hang.set()
        answers: list[httpx.Response] = []
        body = {"prompt": "p", "temperature": 0}

        def ask() -> None:
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=30))

        client = threading.Thread(target=ask, daemon=True)
        client.start()
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert httpx.get(f"{server.url}/health").json()["status"] == "stalled"
        hang.clear()
        gate.set()
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        client.join(10)
        assert answers[0].status_code == 200


def test_a_port_in_use_is_refused_at_once() -> None:
    """F03."""
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port}"):
            bind("127.0.0.1", port)
        assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("host", "port"), [("203.0.113.1", 0), ("127.0.0.1", 10**6), ("127.0.0.1", -1), ("no host", 0)]
)
def test_an_address_that_cannot_be_had_is_refused(host: str, port: int) -> None:
    with pytest.raises(UsageError, match=r"cannot listen on|must be in"):
        bind(host, port)


def test_port_0_shows_the_real_one() -> None:
    """F03."""
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    with bind("0.0.0.0", 0) as sock:
        assert url_of(sock).startswith("http://127.0.0.1:")
    if socket.has_ipv6:
        with bind("::1", 0) as sock:
            assert url_of(sock).startswith("http://[::1]:")


def test_ready_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with real_server({"p": "x"}) as server:
        url = server.url
    out = capsys.readouterr().out
    assert out == f"shark-serve: ready at {url}  fake\n"


def test_the_body_is_json_also_through_a_socket() -> None:
    with real_server({"p": "é"}) as server:
        raw = json.dumps({"prompt": "p", "temperature": 0}).encode()
        response = httpx.post(
            f"{server.url}/v1/completions",
            content=raw,
            headers={"content-type": "application/json"},
        )
        assert response.json()["choices"][0]["text"] == "é"
        assert "server" not in response.headers
