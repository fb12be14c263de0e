"""The page at / and the numbers behind it."""

from __future__ import annotations

import re
import threading
from html.parser import HTMLParser

import httpx

from serve_harness import MODEL, fake_server, real_server
from shark_llm.server.status_page import ServerStatus


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_numbers_are_the_engines() -> None:
    with fake_server({"p": "abc"}) as server:
        before = server.get("/status").json()
        assert before["model"] == MODEL
        assert before["status"] == "ok"
        assert before["running"] == before["waiting"] == 0
        assert before["max_model_len"] == 512
        server.complete("p" * 40, max_tokens=3, ignore_eos=True)
        server.complete("p" * 40, max_tokens=3, ignore_eos=True)
        server.wait_idle()
        body = ServerStatus(**server.get("/status").json())
        stats = server.engine.stats()
        assert body.generation_tokens == stats.generation_tokens == 6
        assert body.prompt_tokens == 82
        assert body.prefix_cache_hits == stats.prefix_cache_hits == 32
        assert body.kv_cache_usage == 0
        assert body.kv_cache_cached == stats.pages_cached / stats.pages_total
        assert body.requests_finished == {"length": 2}


def test_while_loading_it_says_so() -> None:
    hold = threading.Event()
    with real_server(before_loaded=lambda: hold.wait(10) and None, wait_ready=False) as server:
        body = httpx.get(server.url + "/status").json()
        assert body["status"] == "loading"
        assert body["phase"]
        assert body["running"] is None
        assert httpx.get(server.url + "/").status_code == 200
        hold.set()


def test_the_page_is_open_and_the_numbers_are_not() -> None:
    with fake_server(settings={"api_keys": ("k",)}) as server:
        page = server.get("/")
        assert page.status_code == 200
        assert MODEL not in page.text
        assert server.get("/status").status_code == 401
        assert server.get("/status", headers={"Authorization": "Bearer k"}).status_code == 200


def test_the_page_stands_alone() -> None:
    """Nothing is loaded from elsewhere, and the policy lets nothing else run."""
    with fake_server() as server:
        page = server.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy
    assert "http:" not in page.text
    assert "https:" not in page.text
    parser = _Tags()
    parser.feed(page.text)
    names = [tag for tag, _ in parser.tags]
    assert names.count("script") == names.count("style") == names.count("h1") == 1
    assert not any("style" in attrs or "onclick" in attrs for _, attrs in parser.tags)
    ids = [attrs["id"] for _, attrs in parser.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    (html,) = [attrs for tag, attrs in parser.tags if tag == "html"]
    assert html["lang"] == "en"
    labels = [attrs["for"] for tag, attrs in parser.tags if tag == "label"]
    inputs = [attrs["id"] for tag, attrs in parser.tags if tag == "input"]
    assert labels == inputs
    for tag, attrs in parser.tags:
        if tag == "progress":
            assert attrs["aria-labelledby"] in ids
    assert "prefers-color-scheme: dark" in page.text


def test_the_script_reads_what_the_server_sends() -> None:
    with fake_server() as server:
        html = server.get("/").text
    fields = set(re.findall(r"body\.(\w+)", html)) - {"time"}
    fields |= set(re.findall(r'rate\("(\w+)"\)', html))
    assert fields <= set(ServerStatus.model_fields)
    ids = set(re.findall(r'id="(\w+)"', html))
    assert set(re.findall(r'(?:show|at)\("(\w+)"', html)) <= ids
