"""Requests to the hub for one repository, and what its refusals mean to a user.

Everything goes through the session of `huggingface_hub`, which knows proxies, certificates and the
offline switch. That client's own download starts a file over after a kill; ours resumes it
(`download.py`), so only listings and sizes are asked for by its API. Files that the hub keeps in
Xet storage come over plain HTTP too, by the address that it gives to clients without Xet.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from shark_llm import __version__
from shark_llm.errors import HubError
from shark_llm.hub.location import COMMIT, hub_endpoint
from shark_llm.hub.settings import HubSettings

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

PART_BYTES = 4 << 30
"""Most bytes of one request: the hub's CDN sends no answers over 50 GB, and its addresses age."""
LONGEST_WAIT_S = 60.0
"""A hub that asks for a longer wait than this is reported instead of waited for."""

_TOKEN = re.compile(r"[!-~]+")
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
T = TypeVar("T")


class UnreachableError(HubError):
    """The hub does not answer, or only that it cannot serve now: the cache may still do."""

    retry_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file of one commit."""

    name: str
    num_bytes: int | None
    """None: the listing does not say (some mirrors)."""
    etag: str | None
    """sha256 of the content for LFS files, git's sha1 of it for others; None as above."""


class HubClient:
    """One repository, seen through one token. Raises HubError, of which UnreachableError is one."""

    def __init__(self, repo_id: str, settings: HubSettings) -> None:
        from huggingface_hub import constants

        self.repo_id = repo_id
        self.endpoint = hub_endpoint()
        self.retry_delays_s = settings.retry_delays_s
        self.timeout_s = settings.timeout_s or float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        self._token, self._token_source = _find_token(settings.token)

    def list_files(self, revision: str | None) -> tuple[str, dict[str, RemoteFile]]:
        """The commit that `revision` means now, and its files by name."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint, token=self._token or False, library_name="shark-llm")
        info = self._asked(
            lambda: api.model_info(
                self.repo_id, revision=revision, files_metadata=True, timeout=self.timeout_s
            ),
            revision=revision,
        )
        if info.sha is None or info.siblings is None:
            raise HubError(f"{self.endpoint} lists no files of {self.repo_id}: is it a hub?")
        if COMMIT.fullmatch(info.sha) is None:  # it names a directory of the cache
            raise HubError(f"{self.endpoint} gives {info.sha!r} as a commit: is it a hub?")
        files = {
            sibling.rfilename: RemoteFile(
                name=sibling.rfilename,
                num_bytes=sibling.lfs.size if sibling.lfs else sibling.size,
                etag=sibling.lfs.sha256 if sibling.lfs else sibling.blob_id,
            )
            for sibling in info.siblings
        }
        return info.sha, files

    def complete(self, file: RemoteFile, commit: str) -> RemoteFile:
        """`file` with size and etag, asked for one by one where the listing did not say."""
        if file.num_bytes is not None and file.etag is not None:
            return file
        from huggingface_hub import get_hf_file_metadata

        metadata = self._asked(
            lambda: get_hf_file_metadata(
                self._url(file.name, commit),
                token=self._token or False,
                timeout=self.timeout_s,
                endpoint=self.endpoint,
            ),
            file=file.name,
        )
        if metadata.size is None or metadata.etag is None:
            raise HubError(
                f"{self.endpoint} gives no size or ETag for {file.name} of {self.repo_id}, so that"
                " its download could not be checked: use another hub (HF_ENDPOINT)"
            )
        return dataclasses.replace(file, num_bytes=metadata.size, etag=metadata.etag)

    @contextmanager
    def read(
        self, name: str, commit: str, *, start: int, num_bytes: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Read a file of `num_bytes` bytes from byte `start` on.

        Yields where the answer begins (0 when the hub ignores ranges) and its chunks, which may end
        after PART_BYTES. Redirects to a CDN are followed, without the token.
        """
        from huggingface_hub import get_session, hf_raise_for_status

        headers = {"user-agent": f"shark-llm/{__version__}", "accept-encoding": "identity"}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        stop = min(start + PART_BYTES, num_bytes)
        if (start, stop) != (0, num_bytes):
            headers["range"] = f"bytes={start}-{stop - 1}"
        with (
            self._translated(file=name),
            get_session().stream(
                "GET", self._url(name, commit), headers=headers, timeout=self.timeout_s
            ) as response,
        ):
            hf_raise_for_status(response)
            begin = 0
            if response.status_code == 206:
                found = re.match(r"bytes (\d+)-", response.headers.get("content-range", ""))
                begin = int(found[1]) if found else -1
                if begin != start:
                    raise UnreachableError(f"{name}: the hub sent another part than asked for")
            # As the network gives them: a chunk being filled up would be lost with the connection.
            yield begin, response.iter_bytes()

    def _url(self, name: str, commit: str) -> str:
        return f"{self.endpoint}/{self.repo_id}/resolve/{commit}/{quote(name)}"

    def _asked(
        self, request: Callable[[], T], *, revision: str | None = None, file: str | None = None
    ) -> T:
        """The answer of `request`, tried again while the hub says that it is busy."""
        for delay in (*self.retry_delays_s, None):
            try:
                with self._translated(revision=revision, file=file):
                    return request()
            except UnreachableError as error:
                # No answer at all: the cache is a better place to look than the next attempt.
                if delay is None or error.retry_after_s is None:
                    raise
                time.sleep(max(delay, error.retry_after_s))
            except (ValueError, KeyError, TypeError) as error:  # from the client's parsing
                raise HubError(
                    f"{self.endpoint} does not answer as a hub does ({type(error).__name__}):"
                    " check HF_ENDPOINT"
                ) from error
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _translated(
        self, *, revision: str | None = None, file: str | None = None
    ) -> Iterator[None]:
        """Turn what the client raises into a HubError; the token stays out of every message."""
        import httpx2  # which the client is built on
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        try:
            yield
        except OfflineModeIsEnabled as error:
            raise UnreachableError("HF_HUB_OFFLINE was set when this program started") from error
        except HfHubHTTPError as error:
            raise self._refusal(error, revision, file) from None
        except httpx2.HTTPError as error:
            raise UnreachableError(
                f"no network: {self.endpoint} does not answer ({_kind(error)}): check the network,"
                " a proxy (HTTPS_PROXY) or HF_ENDPOINT"
            ) from None

    def _refusal(self, error: HfHubHTTPError, revision: str | None, file: str | None) -> HubError:
        response = error.response
        status, code = response.status_code, response.headers.get("X-Error-Code")
        what = f"{self.repo_id}, revision {revision}" if revision else self.repo_id
        if code == "GatedRepo":
            return HubError(self._gated())
        if code == "RevisionNotFound":
            return HubError(
                f"{what}: no such branch, tag or commit: see {self.endpoint}/{self.repo_id}/commits"
            )
        if code == "EntryNotFound" or (status == 404 and file is not None):
            return HubError(
                f"{self.repo_id}: has no file {file}: see {self.endpoint}/{self.repo_id}"
            )
        if status == 401 and self._token is not None and self._is_bad_token(error):
            return HubError(
                f"bad token: {self.endpoint} does not know the token from {self._token_source}:"
                " replace it (hf auth login), or remove it: public models need none"
            )
        if code == "RepoNotFound" or status in (401, 404):
            return HubError(self._private_or_missing())
        if status == 403:
            return HubError(
                f"{self.repo_id}: {self.endpoint} forbids the access (HTTP 403): give a token with"
                " the right to read this repository (--hf-token or HF_TOKEN)"
            )
        return self._busy(status, response.headers)

    def _gated(self) -> str:
        page = f"{self.endpoint}/{self.repo_id}"
        if self._token is None:
            return (
                f"{self.repo_id}: is gated: accept its terms at {page}, then pass your token with"
                " --hf-token or HF_TOKEN"
            )
        return (
            f"{self.repo_id}: is gated, and the account of the token from {self._token_source} has"
            f" no access: ask for it at {page}; a fine-grained token also needs the right to read"
            " gated repositories"
        )

    def _private_or_missing(self) -> str:
        start = f"{self.repo_id}: is private or does not exist on {self.endpoint}: check the name"
        if self._token is None:
            return f"{start}; for a private model pass your token with --hf-token or HF_TOKEN"
        return f"{start}; the token from {self._token_source} does not open it"

    def _busy(self, status: int, headers: Any) -> HubError:
        name = "asks for fewer requests" if status == 429 else "has a fault"
        message = f"{self.endpoint} {name} (HTTP {status})"
        if status not in _RETRIED:
            return HubError(f"{message} when asked for {self.repo_id}: try again later")
        wait = headers.get("Retry-After", "")
        seconds = float(wait) if wait.isdigit() else 0.0
        if seconds > LONGEST_WAIT_S:
            return HubError(f"{message}: try again in {seconds:.0f} s, or with a token")
        unreachable = UnreachableError(f"{message}: try again later")
        unreachable.retry_after_s = seconds
        return unreachable

    def _is_bad_token(self, error: HfHubHTTPError) -> bool:
        """Whether a 401 is the token's fault: as it says, or as the hub says of the token alone."""
        if "invalid credentials" in (error.server_message or "").lower():
            return True
        from huggingface_hub import get_session

        # Without retries and without the client's own texts, which quote where a token is stored.
        with self._translated():
            response = get_session().get(
                f"{self.endpoint}/api/whoami-v2",
                headers={"authorization": f"Bearer {self._token}"},
                timeout=self.timeout_s,
            )
        return bool(response.status_code == 401)


def _find_token(given: str | None) -> tuple[str | None, str]:
    """The token to send, and where it comes from."""
    from huggingface_hub import constants, get_token

    if given is not None:
        token, source = given.strip(), "--hf-token"
    else:
        implicit = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        token = implicit or ""
        in_environment = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
        source = "HF_TOKEN" if in_environment else f"{constants.HF_TOKEN_PATH} (hf auth login)"
        if not token:
            return None, ""
    if _TOKEN.fullmatch(token) is None:
        # The HTTP library would quote such a header in its own error.
        raise HubError(
            f"bad token: what comes from {source} is empty or has characters that no token has:"
            " copy it again from the hub's settings"
        )
    return token, source


def _kind(error: BaseException) -> str:
    """The kind of a transport error and its cause in the system: no addresses, no headers."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{type(error).__name__}, {cause.strerror}"
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__
