"""What `--hf-model` names: something on this disk, or a model on the hub. No network here.

./llama, /data/llama, ~/llama               local, and never sent to the hub
llama, data/llama.gguf                      local when it exists
org/name                                    a repository, unless such a path exists
org/name:file.gguf                          one GGUF file of a repository
https://huggingface.co/org/name             a repository; also hf.co and the host of HF_ENDPOINT
https://.../org/name/tree/<revision>        the same at a branch, tag or commit
https://.../org/name/blob/<revision>/f.gguf one GGUF file; also /resolve/
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, unquote, urlsplit

from shark_llm.errors import UsageError

DEFAULT_ENDPOINT = "https://huggingface.co"
HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
FORMS = "a local path, org/name, org/name:file.gguf or an https address of the hub"

COMMIT = re.compile(r"[0-9a-f]{40}")

# The hub's own rule: letters, digits, "-", "_" and ".", neither of the last two at an end.
_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REPO_ID = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_][\w./+-]*", re.ASCII)
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """A directory or a file that is there."""

    path: Path
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A repository of the hub, or one GGUF file of it."""

    repo_id: str
    revision: str | None
    """Branch, tag or commit; None: what the hub calls main."""
    gguf_file: str | None

    @property
    def name(self) -> str:
        return self.repo_id if self.gguf_file is None else f"{self.repo_id}:{self.gguf_file}"


ModelLocation = LocalModel | HubModel


def hub_endpoint() -> str:
    """The hub's address: HF_ENDPOINT, or huggingface.co. Raises UsageError for no address."""
    endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    if re.fullmatch(r"https?://[^\s/@]+(/[^\s@]*)?", endpoint) is None:
        raise UsageError(
            f"HF_ENDPOINT is no address of a hub: expected the form {DEFAULT_ENDPOINT}"
        )
    return endpoint


def parse_model(text: str, *, revision: str | None = None) -> ModelLocation:
    """Decide what `text` names; `revision` is the one asked for beside it.

    What exists on this disk wins over the hub. Raises UsageError for what is neither there nor
    anything the hub could have, and says what was looked for.
    """
    if revision is not None:
        _check_revision(revision)
    if "://" in text:
        return _parse_url(text, revision)
    path = _local_path(text)
    if path is not None and os.path.exists(path):
        return _local_model(text, path, revision)
    if path is None or text[0] in "./~":
        raise _no_such_path(text, path)
    repo_id, colon, file = text.partition(":")
    if _is_repo_id(repo_id) and not repo_id.endswith(_FILE_SUFFIXES):
        gguf_file = _gguf_file(text, file) if colon else None
        return HubModel(repo_id=repo_id, revision=revision, gguf_file=gguf_file)
    raise _no_such_path(text, path)


def is_inside(file_name: object) -> bool:
    """Whether a file name from a repository stays in the repository's own directory."""
    if not isinstance(file_name, str) or not file_name or "\\" in file_name or "\0" in file_name:
        return False
    path = PurePosixPath(file_name)
    return not path.is_absolute() and ".." not in path.parts and path.parts != ()


def _local_path(text: str) -> Path | None:
    if not text or "\0" in text:  # "" would be the working directory
        return None
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~user, and no such user
        return None


def _local_model(text: str, path: Path, revision: str | None) -> LocalModel:
    if revision is not None:
        raise UsageError(
            f"--revision {revision} was given, but {text} is a local path, which has none: leave it"
            f" out, or name the hub's model as {hub_endpoint()}/org/name"
        )
    notes: tuple[str, ...] = ()
    if _is_repo_id(text):
        notes = (
            f"{text} is the local path {path.absolute()}; for the hub's model of this name"
            f" write {hub_endpoint()}/{text}",
        )
    return LocalModel(path=path, notes=notes)


def _no_such_path(text: str, path: Path | None) -> UsageError:
    if path is None:
        return UsageError(f"{text!r} names no model: expected {FORMS}")
    wanted = path.absolute()
    nearest = next(parent for parent in wanted.parents if os.path.exists(parent))
    where = f"looked for {wanted}; what is there of it is {nearest}"
    if os.path.islink(wanted):
        where = f"{wanted} is a link to {os.readlink(wanted)}, which is not there"
    if text[0] in "./~":
        return UsageError(f"{text}: no such file or directory ({where})")
    return UsageError(
        f"{text}: no such file or directory ({where}), and no model of the hub either:"
        f" expected {FORMS}"
    )


def _is_repo_id(text: str) -> bool:
    return (
        _REPO_ID.fullmatch(text) is not None
        and "--" not in text
        and ".." not in text
        and not text.endswith(".git")
    )


def _gguf_file(text: str, file: str) -> str:
    if not file.endswith(".gguf") or not is_inside(file):
        raise UsageError(f"{text}: after the colon comes a .gguf file of the repository")
    return PurePosixPath(file).as_posix()


def _check_revision(revision: str) -> None:
    if _REVISION.fullmatch(revision) is None or ".." in revision or "//" in revision:
        raise UsageError(f"revision {revision!r} is no branch, tag or commit: try main")


def _parse_url(text: str, revision: str | None) -> HubModel:
    url = urlsplit(text)
    if url.username is not None or url.password is not None:
        # Not repeated in the message: it may be a token.
        raise UsageError("the model's address holds a user or token: pass it with --hf-token")
    _check_host(text, url)
    parts = [unquote(part) for part in url.path.split("/") if part]
    base = [part for part in urlsplit(hub_endpoint()).path.split("/") if part]
    if base and parts[: len(base)] == base:
        parts = parts[len(base) :]
    repo_id, rest = "/".join(parts[:2]), parts[2:]
    if parts[:1] in (["datasets"], ["spaces"], ["collections"]) or not _is_repo_id(repo_id):
        raise UsageError(f"{text}: is no model's address: expected {hub_endpoint()}/org/name")
    url_revision, file = _revision_and_file(text, rest)
    if url_revision is not None:
        _check_revision(url_revision)
        if revision not in (None, url_revision):
            raise UsageError(
                f"--revision {revision} contradicts the address, which says {url_revision}:"
                " leave one of them out"
            )
        revision = url_revision
    gguf_file = None if file is None else _gguf_file(f"{repo_id}:{file}", file)
    return HubModel(repo_id=repo_id, revision=revision, gguf_file=gguf_file)


def _check_host(text: str, url: SplitResult) -> None:
    endpoint = urlsplit(hub_endpoint())
    try:
        is_endpoint = (url.scheme, url.hostname, url.port) == (
            endpoint.scheme,
            endpoint.hostname,
            endpoint.port,
        )
    except ValueError as error:  # a port that is no number
        raise UsageError(f"{text}: is no address ({error})") from error
    is_hub = url.scheme == "https" and url.hostname in HUB_HOSTS and url.port in (None, 443)
    if not is_endpoint and not is_hub:
        raise UsageError(
            f"{text}: is not on the hub, which is at {hub_endpoint()}; another hub is"
            " named by HF_ENDPOINT"
        )


def _revision_and_file(text: str, rest: list[str]) -> tuple[str | None, str | None]:
    """Revision and file of the parts of an address after org/name."""
    if not rest:
        return None, None
    kind, rest = rest[0], rest[1:]
    # refs/pr/3 and refs/convert/... are the only revisions that the hub writes with bare slashes.
    length = 3 if rest[:1] == ["refs"] else 1
    revision, files = "/".join(rest[:length]), rest[length:]
    if kind == "tree" and revision and not files:
        return revision, None
    if kind in ("blob", "resolve") and revision and files:
        return revision, "/".join(files)
    raise UsageError(
        f"{text}: names no model: expected {hub_endpoint()}/org/name, also with /tree/<revision>,"
        " or the address of a .gguf file"
    )
