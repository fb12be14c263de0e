"""Whatever is sent, the answer is a JSON error with the right status, and the server lives on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve_harness import MODEL, FakeServer, fake_server
from shark_llm.engine.settings import EngineSettings
from shark_llm.errors import RequestError
from shark_llm.server.state import ServerState

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server({"ok": "fine"}, settings={"max_body_bytes": 100_000}) as running:
        yield running
        running.wait_idle()


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    text = body["error"]["message"]
    assert text
    assert len(text) < 400
    assert "Traceback" not in text
    assert "/src/" not in text
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "ok", "stop": "\\udfff"}',
        b'{"prompt": "ok", "model": "\\ud800"}',
        b'{"prompt": "\xff\xfe"}',
        b'\xef\xbb\xbf{"prompt": "ok"}',
        b'{"prompt": "ok", "temperature": NaN}',
        b'{"prompt": "ok", "temperature": Infinity}',
        b'{"prompt": "ok", "temperature": 1e999}',
        b'{"prompt": "ok", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": [1, -1]}',
        b'{"prompt": [1099511627776]}',
        b'{"prompt": [300]}',
        b'{"prompt": [[1], []]}',
        b'{"prompt": "ok", "logit_bias": {"999999": 1}}',
        b'{"prompt": "ok", "stop_token_ids": [1000000000]}',
        b'{"prompt": "ok", "n": 0, "stream": true}',
        b'{"prompt": "ok", "n": "2", "stream": true}',
        b'{"prompt": "ok", "min_tokens": 5, "max_tokens": 4}',
        b'{"prompt": "ok", "suffix": "x"}',
        b'{"prompt": "ok", "best_of": 3, "stream": true}',
        b'{"prompt": "ok", "best_of": 2, "n": 3}',
        b'{"prompt": "ok", "best_of": 129}',
    ],
)
def test_a_malformed_body_is_a_400(server: FakeServer, raw: bytes) -> None:
    """D16, D18, D21, D22, D23, D25: JSON before any stream, and the engine lives on."""
    response = server.request("POST", "/v1/completions", content=raw, headers=JSON)
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert server.complete("ok")["choices"][0]["text"] == "fine"


@pytest.mark.parametrize(
    "prompt", ["a\0b", "\ufeffa", "\U0001f600" * 50, "\u202e", "\n" * 100, "e\u0301"]
)
def test_odd_but_valid_text_is_answered(server: FakeServer, prompt: str) -> None:
    """D25: NUL, a mark of byte order inside the text, many emoji."""
    answer = server.complete(prompt, max_tokens=1, echo=True)
    assert answer["choices"][0]["text"].startswith(prompt)


def test_a_body_above_the_limit_is_a_413(server: FakeServer) -> None:
    """D25: declared or not."""
    big = json.dumps({"prompt": "\U0001f600" * 100_000}).encode()
    error_of(server.request("POST", "/v1/completions", content=big, headers=JSON), 413)

    async def chunks() -> Any:
        for start in range(0, len(big), 4096):
            yield big[start : start + 4096]

    response = server.request("POST", "/v1/completions", content=chunks(), headers=JSON)
    assert error_of(response, 413)["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/vnd.x+json", 200),
        (None, 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
    ],
)
def test_only_json_is_taken(server: FakeServer, content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    raw = b'{"prompt": "ok", "max_tokens": 1}'
    response = server.request("POST", "/v1/completions", content=raw, headers=headers)
    assert response.status_code == status


@pytest.mark.parametrize("model", ["x", "", "fake", "a" * 5000, "é\u0000"])
def test_an_unknown_model_is_named_and_so_is_the_served_one(server: FakeServer, model: str) -> None:
    """D27."""
    body = {"prompt": "ok", "model": model, "messages": [{"role": "user", "content": "x"}]}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        error = error_of(server.post(path, {**body}), 404)
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert MODEL in error["message"]
    error_of(server.get("/v1/models/x"), 404)


def test_no_model_is_the_served_one(server: FakeServer) -> None:
    """D27: missing or null means the one there is."""
    assert server.complete("ok", model=None)["model"] == MODEL
    assert server.complete("ok")["model"] == MODEL
    assert server.get(f"/v1/models/{MODEL}").json()["id"] == MODEL


def test_unknown_routes_and_methods(server: FakeServer) -> None:
    """D27: a missing route reads otherwise than a missing model."""
    assert error_of(server.post("/v1/nope", {}), 404)["code"] == "route_not_found"
    assert error_of(server.get("/nope/" + "x" * 5000), 404)["code"] == "route_not_found"
    response = server.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    error_of(server.request("DELETE", "/v1/models"), 405)


@pytest.mark.parametrize(
    ("tokens", "fields", "status"),
    [
        (511, {}, 200),
        (512, {}, 400),
        (513, {}, 400),
        (2000, {}, 400),
        (500, {"max_tokens": 12}, 200),
        (500, {"max_tokens": 13}, 400),
        (512, {"max_tokens": 0, "echo": True}, 200),
        (513, {"max_tokens": 0, "echo": True}, 400),
    ],
)
def test_the_context_is_not_exceeded(
    server: FakeServer, tokens: int, fields: dict[str, Any], status: int
) -> None:
    """D23: the limit and the count are told; one short of the limit gives one token."""
    body = {"prompt": [5] * tokens, "temperature": 0, **fields}
    response = server.post("/v1/completions", body)
    if status == 400:
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert str(tokens) in error["message"]
        return
    assert response.status_code == 200
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] in ("length", "stop")
    if tokens == 511:
        assert response.json()["usage"]["completion_tokens"] == 1
        assert choice["finish_reason"] == "length"


def test_a_long_chat_is_a_context_error(server: FakeServer) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 600}]}
    error = error_of(server.post("/v1/chat/completions", body), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"


def test_an_empty_prompt_is_the_bos_alone(server: FakeServer) -> None:
    """D23: with a BOS "" is one token; without, it is refused."""
    assert server.complete("", max_tokens=1)["usage"]["prompt_tokens"] == 1
    assert server.complete([""], max_tokens=1)["usage"]["prompt_tokens"] == 1
    bare = {"prompt": "", "add_special_tokens": False}
    error = error_of(server.post("/v1/completions", bare), 400)
    assert error["param"] == "prompt"
    error_of(server.post("/v1/completions", {"prompt": []}), 400)


def test_too_many_choices_are_refused(server: FakeServer) -> None:
    body = {"prompt": ["ok"] * 9, "n": 128}
    assert "1152 choices" in error_of(server.post("/v1/completions", body), 400)["message"]


@pytest.mark.parametrize("phase", ["loading", "draining", "dead"])
def test_out_of_service_is_a_503_everywhere(phase: Any) -> None:
    """F02: /health tells the phase, everything else says when to come back."""
    with fake_server({"ok": "fine"}) as server:
        server.state.phase = phase
        server.state.report("compiling", 40.0)
        body = {"prompt": "ok", "messages": [{"role": "user", "content": "x"}], "text": "a"}
        requests = [
            ("/v1/completions", {"prompt": "ok"}),
            ("/v1/chat/completions", {"messages": body["messages"]}),
            ("/generate", {"text": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ]
        for path, fields in requests:
            response = server.post(path, fields)
            assert error_of(response, 503)["code"] == phase
            assert response.headers["retry-after"] == "1"
        error_of(server.get("/v1/models"), 503)
        health = server.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": phase, "phase": "compiling", "percent": 40.0}
        assert server.get("/version").status_code == 200
        assert server.get("/metrics").status_code == 200


def test_a_stalled_engine_is_unhealthy(server: FakeServer) -> None:
    """F02: a step that hangs."""
    server.state.stalled = True
    assert server.get("/health").json()["status"] == "stalled"
    server.state.stalled = False
    assert server.get("/health").status_code == 200


def test_a_dead_engine_is_unhealthy_before_anybody_has_noticed(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F02: /health said ok for as long as the watcher had not looked, while requests got 503."""
    monkeypatch.setattr(server.engine, "_failure", "the engine failed")
    response = server.get("/health")
    assert response.status_code == 503
    assert response.json()["status"] == "dead"


def test_a_full_queue_is_a_503_and_leaves_nothing_behind() -> None:
    """One call whose last choice finds the queue full takes its other choices back."""
    settings = EngineSettings(max_num_seqs=1, max_num_queued_requests=2)
    with fake_server({"ok": "fine"}, engine_settings=settings, step_seconds=0.01) as server:
        response = server.post("/v1/completions", {"prompt": "ok", "n": 8})
        assert error_of(response, 503)["code"] == "queue_full"
        assert response.headers["retry-after"] == "1"
        server.wait_idle()


def test_a_fault_of_the_device_is_a_500_without_details() -> None:
    """D17: whole answers say so, streams send an error and no finish_reason; then all is well."""
    broken: list[int] = []

    def fail(index: int, phase: Any, rows: Any) -> None:
        if broken and broken.pop():
            raise RuntimeError("/secret/path: hip error 719")

    with fake_server({"ok": "fine"}, on_forward=fail) as server:
        broken[:] = [1]
        error = error_of(server.post("/v1/completions", {"prompt": "ok"}), 500)
        assert error["type"] == "server_error"
        assert "secret" not in error["message"]
        assert server.complete("ok")["choices"][0]["text"] == "fine"
        server.wait_idle()


def test_a_bug_of_our_own_is_a_plain_500(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(self: ServerState, name: str | None = None) -> None:
        raise AssertionError("/secret: our own bug")

    with fake_server() as server:
        monkeypatch.setattr(ServerState, "model", explode)
        response = server.post("/v1/completions", {"prompt": "ok"})
        error = error_of(response, 500)
        assert "secret" not in error["message"]
        assert response.headers["x-request-id"] in error["message"]


def test_request_errors_keep_their_parts() -> None:
    state = ServerState()
    with pytest.raises(RequestError) as caught:
        state.model()
    assert (caught.value.status, caught.value.code) == (503, "loading")
