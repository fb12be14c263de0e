"""Gated, private or missing, bad token, no network: four messages, each with the step to take."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopback_hub import GOOD_TOKEN, POOR_TOKEN, Fault, LoopbackHub, read_files, serve_hub
from shark_llm.errors import HubError
from shark_llm.hub import HubSettings, resolve_checkpoint
from tiny import write_tiny

BAD_TOKEN = "hf_loopbackUnknownToken"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return read_files(write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes]
) -> Iterator[LoopbackHub]:
    for hub in serve_hub(monkeypatch, tmp_path / "hf-home"):
        hub.add_repo("org/public", files)
        hub.add_repo("org/gated", files, gated=True)
        hub.add_repo("org/private", files, private=True)
        yield hub


def message(model: str, token: str | None = None) -> str:
    settings = HubSettings(token=token, retry_delays_s=(0.0,), timeout_s=2.0)
    with pytest.raises(HubError) as caught:
        resolve_checkpoint(model, settings=settings)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_four_different_messages(hub: LoopbackHub, caplog: pytest.LogCaptureFixture) -> None:
    """A25: 401 for gated, private, misspelt and bad tokens do not all read "not found"."""
    caplog.set_level(logging.DEBUG)
    gated = message("org/gated")
    assert "is gated: accept its terms at" in gated
    assert f"{hub.endpoint}/org/gated" in gated
    assert "--hf-token" in gated

    missing = message("org/misspelt")
    assert "is private or does not exist" in missing
    assert "check the name" in missing
    assert message("org/private") == missing.replace("org/misspelt", "org/private")

    bad = message("org/public", token=BAD_TOKEN)
    assert bad.startswith("bad token:")
    assert "--hf-token" in bad
    assert "public models need none" in bad

    hub.close()
    no_network = message("org/public")
    assert "no network" in no_network
    assert "Connection refused" in no_network
    assert len({gated, missing, bad, no_network}) == 4
    assert BAD_TOKEN not in caplog.text
    assert BAD_TOKEN not in bad


def test_a_token_that_opens_nothing(hub: LoopbackHub, caplog: pytest.LogCaptureFixture) -> None:
    """A25: a good token of an account without access: 403 and 404 instead of 401."""
    caplog.set_level(logging.DEBUG)
    gated = message("org/gated", token=POOR_TOKEN)
    assert "the account of the token from --hf-token has no access" in gated
    private = message("org/private", token=POOR_TOKEN)
    assert "the token from --hf-token does not open it" in private
    assert POOR_TOKEN not in gated + private + caplog.text


def test_the_right_token_opens_both(hub: LoopbackHub) -> None:
    settings = HubSettings(token=GOOD_TOKEN)
    for model in ("org/gated", "org/private"):
        assert resolve_checkpoint(model, settings=settings).name == model


def test_where_the_token_came_from_is_named(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A25: a stale token of the environment or of a login spoils public models, too."""
    token_file = tmp_path / "hf-home" / "token"
    token_file.parent.mkdir(exist_ok=True)
    token_file.write_text(BAD_TOKEN)
    assert f"does not know the token from {token_file} (hf auth login)" in message("org/public")
    monkeypatch.setenv("HF_TOKEN", BAD_TOKEN)
    assert "does not know the token from HF_TOKEN" in message("org/public")
    assert BAD_TOKEN not in message("org/public")


@pytest.mark.parametrize("token", ["", "  ", "hf_with blank", "hf_with\nnewline", "hf_ü"])
def test_what_can_be_no_token_is_not_sent(hub: LoopbackHub, token: str) -> None:
    text = message("org/public", token=token)
    assert text.startswith("bad token: what comes from --hf-token is empty or has characters")
    assert "hf_" not in text
    assert hub.requests == []


def test_unmarked_401_is_decided_by_asking_about_the_token(hub: LoopbackHub) -> None:
    """Some hubs say only 401; whether the token is known tells the two causes apart."""
    hub.fault("/api/models", Fault(status=401))
    assert "is private or does not exist" in message("org/public", token=POOR_TOKEN)
    assert hub.requests[-1].path == "/api/whoami-v2"
    assert "is private or does not exist" in message("org/public")
    hub.fault("/api/whoami-v2", Fault(status=401))
    assert message("org/public", token=POOR_TOKEN).startswith("bad token")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (403, "forbids the access (HTTP 403): give a token"),
        (418, "has a fault (HTTP 418)"),
        (429, "asks for fewer requests (HTTP 429): try again later"),
        (500, "has a fault (HTTP 500): try again later"),
        (503, "has a fault (HTTP 503): try again later"),
    ],
)
def test_other_answers(hub: LoopbackHub, status: int, expected: str) -> None:
    hub.fault("/api/models", Fault(status=status))
    assert expected in message("org/public")


def test_a_server_that_is_no_hub(hub: LoopbackHub) -> None:
    hub.fault("/api/models", Fault(status=200))
    assert "check HF_ENDPOINT" in message("org/public") or "is it a hub" in message("org/public")


def test_a_commit_that_leads_out_of_the_cache(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server says is no path until it was looked at."""
    answer = LoopbackHub._open

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        found = answer(*args, **kwargs)
        return found and ("../../../elsewhere", found[1])

    monkeypatch.setattr(LoopbackHub, "_open", elsewhere)
    assert "'../../../elsewhere' as a commit: is it a hub?" in message("org/public")


def test_a_name_that_does_not_resolve(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_dns(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_dns)
    assert "no network" in message("org/public")
    assert "Name or service not known" in message("org/public")


def test_a_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for _hub in serve_hub(monkeypatch, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
            settings = HubSettings(timeout_s=0.2)
            with pytest.raises(HubError, match=r"no network: .* \(ReadTimeout"):
                resolve_checkpoint("org/public", settings=settings)
