"""The status page in a real browser, where one is installed: it must run, and show the numbers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from serve_harness import MODEL, real_server

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome in PATH")
def test_the_page_shows_what_the_server_did(tmp_path: Path) -> None:
    assert BROWSER is not None
    with real_server({"p": "abc"}) as server:
        body = {"prompt": "p" * 40, "max_tokens": 7, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        command = [
            BROWSER,
            "--headless",
            "--no-sandbox",  # in a container there is none to be had
            "--disable-gpu",
            f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=3000",
            "--dump-dom",
            f"{server.url}/",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    shown = dict(re.findall(r'id="(\w+)"[^>]*>([^<]*)<', done.stdout))
    assert shown["model"] == MODEL
    assert shown["state"] == "ok"
    assert shown["generation_tokens"] == "9"  # 2 of them to become ready
    assert shown["prompt_tokens"] == "43"
    assert shown["answered"] == "2"
    assert shown["running"] == "0"
    assert shown["generation_rate"] == "0.0"
    assert shown["hit_rate"].endswith("%")
