"""API keys, CORS, request ids, the access log and the OpenAPI document."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from serve_harness import FakeServer, fake_server
from shark_llm.server.app import ENDPOINTS

BODY = {"prompt": "ok", "max_tokens": 1}
ORIGIN = "https://chat.example"


@pytest.fixture(scope="module")
def guarded() -> Iterator[FakeServer]:
    settings = {"api_keys": ("one", "two"), "cors_allow_origins": (ORIGIN,)}
    with fake_server({"ok": "fine"}, settings=settings) as running:
        yield running


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("one", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Bearer three", 401),
        ("Bearer ONE", 401),
        ("Bearer one two", 401),
        ("Basic one", 401),
        ("Bearer \u00e9", 401),
        ("Bearer one", 200),
        ("Bearer two", 200),
        ("bearer one", 200),
    ],
)
def test_only_a_key_lets_in(guarded: FakeServer, header: str | None, status: int) -> None:
    """D28."""
    headers = {} if header is None else {"authorization": header.encode()}
    response = guarded.post("/v1/completions", BODY, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
        assert guarded.get("/metrics", headers=headers).status_code == 401
        assert guarded.get("/nope", headers=headers).status_code == 401


def test_health_is_open(guarded: FakeServer) -> None:
    """D28."""
    assert guarded.get("/health").status_code == 200


def test_a_preflight_needs_no_key(guarded: FakeServer) -> None:
    """D28: OPTIONS with an Origin is answered with the CORS headers."""
    headers = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = guarded.request("OPTIONS", "/v1/chat/completions", headers=headers)
    assert response.status_code in (200, 204)
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    foreign = guarded.request("OPTIONS", "/v1/models", headers=headers | {"origin": "https://x"})
    assert "access-control-allow-origin" not in foreign.headers


def test_answers_and_refusals_carry_cors_headers(guarded: FakeServer) -> None:
    for key, status in (("one", 200), ("no", 401)):
        headers = {"origin": ORIGIN, "authorization": f"Bearer {key}"}
        response = guarded.post("/v1/completions", BODY, headers=headers)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN


def test_without_the_flag_there_is_no_cors() -> None:
    with fake_server() as server:
        response = server.get("/health", headers={"origin": ORIGIN})
        assert "access-control-allow-origin" not in response.headers
        preflight = server.request("OPTIONS", "/v1/completions", headers={"origin": ORIGIN})
        assert preflight.status_code == 405


@pytest.mark.parametrize("sent", ["abc-123", "x" * 128])
def test_the_clients_request_id_is_kept(guarded: FakeServer, sent: str) -> None:
    response = guarded.get("/health", headers={"x-request-id": sent})
    assert response.headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "x" * 129, "a b", "a\tb"])
def test_a_strange_request_id_is_replaced(guarded: FakeServer, sent: str) -> None:
    response = guarded.get("/health", headers={"x-request-id": sent})
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_the_access_log_is_one_line(guarded: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """No line can be forged through the path."""
    with caplog.at_level(logging.INFO, logger="shark_llm.server"):
        guarded.get("/a%0aFORGED", headers={"x-request-id": "abc"})
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if line.startswith("abc ")]  # others may be shutting down
    assert re.fullmatch(r'abc "GET /a\\nFORGED" 401 \d+\.\d{3}s', line)


def test_openapi_describes_every_endpoint(guarded: FakeServer) -> None:
    headers = {"authorization": "Bearer one"}
    document = guarded.get("/openapi.json", headers=headers).json()
    for endpoint in ENDPOINTS:
        operation = document["paths"][endpoint.path][endpoint.method.lower()]
        assert ("requestBody" in operation) == (endpoint.request is not None)
        assert "200" in operation["responses"]
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)
