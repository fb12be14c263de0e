"""What `--hf-model` may be, and what of it never reaches the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from shark_llm.errors import UsageError
from shark_llm.hub import HubModel, LocalModel, parse_model


@pytest.fixture(autouse=True)
def _default_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", ("meta-llama/Llama-3.1-8B", None, None)),
        ("https://huggingface.co/org/name", ("org/name", None, None)),
        ("https://huggingface.co/org/name/", ("org/name", None, None)),
        ("https://hf.co/org/name?library=x#readme", ("org/name", None, None)),
        ("https://huggingface.co/org/name/tree/v1.0", ("org/name", "v1.0", None)),
        ("https://huggingface.co/org/name/tree/refs/pr/3", ("org/name", "refs/pr/3", None)),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F3", ("org/name", "refs/pr/3", None)),
        ("https://huggingface.co/org/name/tree/feature%2Fx", ("org/name", "feature/x", None)),
        (
            "https://huggingface.co/org/name/blob/main/sub/q4.gguf",
            ("org/name", "main", "sub/q4.gguf"),
        ),
        ("https://huggingface.co/org/name/resolve/main/q4.gguf", ("org/name", "main", "q4.gguf")),
        ("org/name:q4.gguf", ("org/name", None, "q4.gguf")),
        ("org/name:sub/q4.gguf", ("org/name", None, "sub/q4.gguf")),
    ],
)
def test_names_of_the_hub(text: str, expected: tuple[str, str | None, str | None]) -> None:
    repo_id, revision, gguf_file = expected
    assert parse_model(text) == HubModel(repo_id=repo_id, revision=revision, gguf_file=gguf_file)


@pytest.mark.parametrize(
    "text",
    [
        "./no/such/dir",
        "../name",
        "/no/such",
        "~/no/such",
        "~nobody-of-this-name/x",
        ".",
        "./org/name:file.gguf",
    ],
)
def test_what_looks_like_a_path_is_never_a_repository(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A25: a mistyped local path is not sent to the hub."""
    monkeypatch.chdir(tmp_path)
    if text == ".":
        assert parse_model(text) == LocalModel(path=Path())
        return
    with pytest.raises(UsageError, match=r"no such file or directory|names no model"):
        parse_model(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpt2",
        "a/b/c",
        "models/llama.gguf",
        "models/model.safetensors",
        "org/na me",
        "org/-name",
        "org/a--b",
        "org/name.git",
        "org/name/",
        "org/name:",
        "org/name:model.safetensors",
        "org/name:../x.gguf",
        "https://example.com/org/name",
        "http://huggingface.co/org/name",
        "https://huggingface.co/org",
        "https://huggingface.co/datasets/org/name",
        "https://huggingface.co/org/name/tree/main/sub",
        "https://huggingface.co/org/name/tree",
        "https://huggingface.co/org/name/discussions/1",
        "https://huggingface.co/org/name/blob/main/config.json",
        "https://huggingface.co/org/name/tree/..%2Fx",
        "https://huggingface.co:99999/org/name",
        "a\0b",
    ],
)
def test_what_names_no_model_is_refused_here(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        parse_model(text)


def test_a_mistyped_path_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(UsageError) as caught:
        parse_model(f"{tmp_path}/models/lama/1")
    assert f"looked for {tmp_path}/models/lama/1" in str(caught.value)
    assert f"what is there of it is {tmp_path}/models" in str(caught.value)


def test_a_dangling_link_says_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("gone")
    with pytest.raises(UsageError, match="is a link to gone, which is not there"):
        parse_model(f"{tmp_path}/model")


def test_what_exists_wins_over_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(parse_model("org/name"), HubModel)
    (tmp_path / "org" / "name").mkdir(parents=True)
    location = parse_model("org/name")
    assert isinstance(location, LocalModel)
    assert "https://huggingface.co/org/name" in location.notes[0]


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "llama").mkdir()
    assert parse_model("~/llama") == LocalModel(path=tmp_path / "llama")


def test_revision_beside_the_name() -> None:
    assert parse_model("org/name", revision="v2") == HubModel(
        repo_id="org/name", revision="v2", gguf_file=None
    )
    url = "https://huggingface.co/org/name/tree/v1"
    assert parse_model(url, revision="v1") == parse_model(url)
    with pytest.raises(UsageError, match="--revision v2 contradicts the address, which says v1"):
        parse_model(url, revision="v2")
    for bad in ("", "../x", "a b", "/abs", "-x"):
        with pytest.raises(UsageError, match="is no branch, tag or commit"):
            parse_model("org/name", revision=bad)


def test_a_local_path_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--revision main was given, but .* is a local path"):
        parse_model(str(tmp_path), revision="main")


def test_hf_endpoint_is_another_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.local:8080/hf/")
    expected = HubModel(repo_id="org/name", revision="v1", gguf_file=None)
    assert parse_model("http://mirror.local:8080/hf/org/name/tree/v1") == expected
    assert parse_model("https://huggingface.co/org/name/tree/v1") == expected
    with pytest.raises(UsageError, match="is not on the hub"):
        parse_model("http://mirror.local:9090/org/name")
    monkeypatch.setenv("HF_ENDPOINT", "mirror.local")
    with pytest.raises(UsageError, match="HF_ENDPOINT is no address of a hub"):
        parse_model("https://mirror.local/org/name")


def test_a_token_in_an_address_is_refused_and_not_repeated() -> None:
    """A25: the token is never in a message."""
    with pytest.raises(UsageError, match="--hf-token") as caught:
        parse_model("https://user:hf_secret@huggingface.co/org/name")
    assert "hf_secret" not in str(caught.value)
