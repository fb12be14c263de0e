"""How the hub is used."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """What a command line may say about the hub; the hub client's own variables count too."""

    revision: str | None = None
    """Branch, tag or commit; None: the one in the model's address, else main."""
    cache_dir: Path | None = None
    """None: HF_HUB_CACHE, HF_HOME/hub or ~/.cache/huggingface/hub."""
    token: str | None = field(default=None, repr=False)
    """None: HF_TOKEN, or what `hf auth login` stored. Never in a message, a log or a file."""
    offline: bool = False
    """Only look into the cache. HF_HUB_OFFLINE=1 says the same."""
    force_download: bool = False
    """Fetch every file again; what is cached stays until its successor is whole."""
    parallel_files: int = 4
    timeout_s: float | None = None
    """Longest silence of the hub in seconds. None: HF_HUB_DOWNLOAD_TIMEOUT, else 10."""
    retry_delays_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    """Waits between attempts in a row that bring nothing, in seconds; one attempt more than waits.
    After one that brought something, the first wait counts. Empty: no second attempt."""

    @property
    def is_offline(self) -> bool:
        variables = (os.environ.get("HF_HUB_OFFLINE"), os.environ.get("TRANSFORMERS_OFFLINE"))
        return self.offline or any((value or "").upper() in _TRUE for value in variables)

    @property
    def cache_root(self) -> Path:
        """Where the hub client keeps its repositories (by its rule, without importing it)."""
        if self.cache_dir is not None:
            return self.cache_dir.expanduser().absolute()
        for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            if value := os.environ.get(variable):
                return Path(os.path.expandvars(value)).expanduser().absolute()
        home = os.environ.get("HF_HOME") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
        )
        return Path(os.path.expandvars(home)).expanduser().absolute() / "hub"
