"""scripts/clients: what needs no environment of its own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from serve_harness import MODEL, real_server

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from client_tests import __main__ as command
from client_tests import clients, environments


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_reads_a_stream() -> None:
    with real_server({"Once upon a time": " there was one"}) as server:
        served = clients.Served(url=server.url, model=MODEL, bundle=Path())
        assert clients.curl(served).endswith("' there was one'")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_client_that_fails_is_named_with_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with real_server() as server:
        served = clients.Served(url=f"{server.url}/nowhere", model=MODEL, bundle=Path())
        with pytest.raises(clients.ClientError, match=r"^curl .* ended with exit code 22$"):
            clients.curl(served)
    assert "not_found" in capsys.readouterr().err, "what it said is shown"


def test_a_client_that_does_not_install_is_told_by_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "CACHE", tmp_path)
    monkeypatch.setattr(environments, "PACKAGES", {"none": (str(tmp_path / "no-such.whl"),)})
    with pytest.raises(environments.InstallError, match=r"no-such\.whl"):
        environments.python_of("none")
    assert not (tmp_path / "none" / "stamp").exists()


def test_an_unknown_client_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.run(["telnet"])
    assert ended.value.code == 2
    assert "no client 'telnet': choose from openai, curl" in capsys.readouterr().err
