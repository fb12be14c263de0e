"""A hub on the loopback interface: the protocol that `huggingface_hub` speaks, and its misfortunes.

    with LoopbackHub() as hub:
        commit = hub.add_repo("org/tiny", read_files(directory))
        hub.fault("model-00002", Fault(cut_after=1000))
        ... HF_ENDPOINT=hub.endpoint ...
        assert hub.requests[0].path == "/api/models/org/tiny/revision/main"

Two servers, as in reality: the hub itself, with listings, small files and redirects, and a CDN on
another port, with the large (LFS) files, where a token must not arrive. What is answered follows
the headers that huggingface_hub 2.4 reads (`_http.py`, `file_download.py`, `hf_api.py` there).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

GOOD_TOKEN = "hf_loopbackGoodToken"
"""Reads private repositories and gated ones."""
POOR_TOKEN = "hf_loopbackPoorToken"
"""Known, but opens nothing that is not public."""
LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")


def read_files(directory: Path) -> dict[str, bytes]:
    """All files of a directory by their name in it."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def serve_hub(
    monkeypatch: pytest.MonkeyPatch, home: Path, *, with_sizes: bool = True
) -> Iterator[LoopbackHub]:
    """The body of a fixture: a hub that HF_ENDPOINT names, an empty HF_HOME and no token."""
    import huggingface_hub
    from huggingface_hub import constants

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(home))
    # The client reads these once, when it is imported.
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with LoopbackHub(with_sizes=with_sizes) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub
        huggingface_hub.close_session()


def git_sha1(content: bytes) -> str:
    """What git calls this content, and the hub's ETag for files outside LFS."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(kw_only=True)
class Fault:
    """Something that goes wrong with the requests whose path holds a given text."""

    status: int | None = None
    """Answer this instead."""
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Announce the whole body, send so many bytes of it and close the connection."""
    stall_after: int | None = None
    """Send so many bytes, then nothing more until the hub is closed."""
    ignore_range: bool = False
    corrupt: bool = False
    """Send the right number of bytes, the first of them wrong."""
    chunked: bool = False
    """Send no length; with `cut_after`, end as if all were sent."""
    times: int = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request as it arrived."""

    server: str
    """"hub" or "cdn"."""
    method: str
    path: str
    headers: dict[str, str]
    """With names in lower case."""


@dataclass(kw_only=True)
class _Repo:
    gated: bool
    private: bool
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)


class LoopbackHub:
    """Both servers, running from `with` to its end."""

    def __init__(self, *, with_sizes: bool = True) -> None:
        self.with_sizes = with_sizes
        """Whether listings tell sizes and digests; some mirrors leave them out."""
        self.requests: list[Request] = []
        self.closing = threading.Event()
        self._repos: dict[str, _Repo] = {}
        self._faults: list[tuple[str, Fault]] = []
        self._lock = threading.Lock()
        self._servers = {name: _Server(self, name) for name in ("hub", "cdn")}
        self.endpoint = self._servers["hub"].address
        self.cdn = self._servers["cdn"].address

    def __enter__(self) -> LoopbackHub:
        for server in self._servers.values():
            server.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End both servers and every connection to them; a second time does nothing."""
        if self.closing.is_set():
            return
        self.closing.set()
        for server in self._servers.values():
            server.stop()

    def add_repo(
        self,
        repo_id: str,
        files: Mapping[str, bytes],
        *,
        revision: str = "main",
        gated: bool = False,
        private: bool = False,
    ) -> str:
        """Push a commit to a (new) repository; returns its 40 hex digits."""
        repo = self._repos.setdefault(repo_id, _Repo(gated=gated, private=private))
        text = repr((repo_id, len(repo.commits), sorted(files)))
        commit = hashlib.sha1(text.encode()).hexdigest()
        repo.commits[commit] = dict(files)
        repo.refs[revision] = commit
        return commit

    def fault(self, path: str, fault: Fault) -> None:
        """Let requests whose path holds `path` (of a resolve address or a CDN file) go wrong."""
        self._faults.append((path, fault))

    def clear_faults(self) -> None:
        self._faults.clear()

    def paths(self, server: str, method: str = "GET") -> list[str]:
        return [r.path for r in self.requests if (r.server, r.method) == (server, method)]

    def downloads(self) -> list[str]:
        """Names of the files that were fetched, from hub or CDN, in order of arrival."""
        found = [path.split("/resolve/")[1] for path in self.paths("hub") if "/resolve/" in path]
        return [path.split("/", 1)[1] for path in found]

    def take_fault(self, path: str) -> Fault | None:
        with self._lock:
            for text, fault in self._faults:
                if text in path and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def record(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def answer(self, handler: _Handler) -> None:
        """Dispatch one request to the hub."""
        path = urlsplit(handler.path).path
        parts = [unquote(part) for part in path.strip("/").split("/")]
        token = handler.headers.get("authorization", "").removeprefix("Bearer ") or None
        if token not in (None, GOOD_TOKEN, POOR_TOKEN):
            handler.refuse(401, None, "Invalid credentials in Authorization header")
        elif parts == ["api", "whoami-v2"]:
            if token is None:
                handler.refuse(401, None, "Invalid username or password.")
            else:
                handler.send_json({"name": "tester", "type": "user"})
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._answer_api(handler, "/".join(parts[2:4]), parts[4:], token)
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._answer_resolve(handler, "/".join(parts[:2]), parts[3], "/".join(parts[4:]), token)
        else:
            handler.refuse(404, None, "Sorry, we can't find the page you are looking for.")

    def _open(
        self, handler: _Handler, repo_id: str, revision: str, token: str | None, *, content: bool
    ) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a repository; None: refused already. Gates only close contents."""
        repo = self._repos.get(repo_id)
        if repo is None or (repo.private and token != GOOD_TOKEN):
            handler.refuse(401 if token is None else 404, "RepoNotFound", "Repository not found")
            return None
        if content and repo.gated and token != GOOD_TOKEN:
            handler.refuse(
                401 if token is None else 403,
                "GatedRepo",
                f"Access to model {repo_id} is restricted.",
            )
            return None
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            handler.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return commit, repo.commits[commit]

    def _answer_api(
        self, handler: _Handler, repo_id: str, rest: list[str], token: str | None
    ) -> None:
        kind, revision = rest[0] if rest else "revision", rest[1] if len(rest) > 1 else "main"
        found = self._open(handler, repo_id, revision, token, content=False)
        if found is None:
            return
        commit, files = found
        if kind == "tree":
            handler.send_json([_tree_entry(name, content) for name, content in files.items()])
        elif kind == "revision":
            wants_sizes = self.with_sizes and "blobs=" in handler.path
            handler.send_json(
                {
                    "id": repo_id,
                    "sha": commit,
                    "siblings": [
                        _sibling(name, content) if wants_sizes else {"rfilename": name}
                        for name, content in files.items()
                    ],
                }
            )
        else:
            handler.refuse(404, None, "Not Found")

    def _answer_resolve(
        self, handler: _Handler, repo_id: str, revision: str, name: str, token: str | None
    ) -> None:
        found = self._open(handler, repo_id, revision, token, content=True)
        if found is None:
            return
        commit, files = found
        headers = {"X-Repo-Commit": commit}
        if name not in files:
            handler.refuse(404, "EntryNotFound", "Entry not found", headers)
            return
        content = files[name]
        if not name.endswith(LFS_SUFFIXES):
            handler.send_content(content, headers | {"ETag": f'"{git_sha1(content)}"'})
            return
        sha256 = hashlib.sha256(content).hexdigest()
        headers |= {
            "ETag": f'"{git_sha1(content)}"',
            "X-Linked-ETag": f'"{sha256}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{self.cdn}/{sha256}/{name}?signature=not-a-token",
        }
        handler.send_content(b"Found. Redirecting", headers, status=302)

    def answer_cdn(self, handler: _Handler) -> None:
        """Dispatch one request to the CDN: contents by digest, and never a token."""
        if "authorization" in handler.headers:
            handler.refuse(400, None, "Only one auth mechanism allowed")
            return
        sha256 = urlsplit(handler.path).path.strip("/").split("/")[0]
        for repo in self._repos.values():
            for files in repo.commits.values():
                for content in files.values():
                    if hashlib.sha256(content).hexdigest() == sha256:
                        handler.send_content(content, {"ETag": f'"{sha256}"'})
                        return
        handler.refuse(404, None, "Not Found")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: LoopbackHub, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.name = hub, name
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._connections: list[socket.socket] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
        for connection in self._connections:  # a kept-alive one would be answered still
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up in the middle is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        hub, name = self.server.hub, self.server.name
        headers = {key.lower(): value for key, value in self.headers.items()}
        path = urlsplit(self.path).path
        hub.record(Request(server=name, method=self.command, path=unquote(path), headers=headers))
        # A fault is for the answer with the content: the CDN's for what lies there.
        is_redirect = name == "hub" and "/resolve/" in path and path.endswith(LFS_SUFFIXES)
        self.fault = None if is_redirect else hub.take_fault(path)
        if self.fault is not None and self.fault.status is not None:
            self.refuse(self.fault.status, None, "loopback fault", self.fault.headers)
        elif name == "hub":
            hub.answer(self)
        else:
            hub.answer_cdn(self)

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        pass

    def refuse(
        self, status: int, code: str | None, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.fault = None
        extra = dict(headers or {}) | {"X-Error-Message": message}
        if code is not None:
            extra["X-Error-Code"] = code
        self.send_json({"error": message}, status=status, headers=extra)

    def send_json(
        self, value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        extra = dict(headers or {}) | {"Content-Type": "application/json"}
        self.send_content(json.dumps(value).encode(), extra, status=status)

    def send_content(
        self, content: bytes, headers: Mapping[str, str], *, status: int = 200
    ) -> None:
        """Answer with `content` or the range of it that was asked for, as far as a fault lets."""
        fault = self.fault or Fault()
        asked = self.headers.get("range", "").removeprefix("bytes=")
        extra = dict(headers)
        body = content
        if asked and status == 200 and not fault.ignore_range:
            first, last = asked.split("-")
            start, stop = int(first), min(int(last) + 1 if last else len(content), len(content))
            if start >= len(content):
                self.fault = None
                self.send_json(
                    {"error": "range"},
                    status=416,
                    headers={"Content-Range": f"bytes */{len(content)}"},
                )
                return
            status, body = 206, content[start:stop]
            extra["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        if fault.corrupt:
            body = bytes([body[0] ^ 0xFF]) + body[1:]
        self.send_response(status)
        for name, value in extra.items():
            self.send_header(name, value)
        if fault.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = body
        for limit in (fault.cut_after, fault.stall_after):
            sent = sent if limit is None else sent[:limit]
        if fault.chunked:
            sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(sent), sent) if sent else b"0\r\n\r\n"
        with contextlib.suppress(ConnectionError):
            self.wfile.write(sent)
            self.wfile.flush()
        if fault.stall_after is not None:
            self.server.hub.closing.wait(10)
        if fault.cut_after is not None or fault.stall_after is not None:
            self.close_connection = True


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
    if name.endswith(LFS_SUFFIXES):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 134}
    return entry


def _tree_entry(name: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(content), "oid": git_sha1(content)}
    if name.endswith(LFS_SUFFIXES):
        sha256 = hashlib.sha256(content).hexdigest()
        entry |= {"lfs": {"size": len(content), "oid": sha256, "pointerSize": 134}}
    return entry
