"""What several files of unit tests start from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tiny

if TYPE_CHECKING:
    from build_harness import FakeCompileSide


@pytest.fixture
def compile_side(monkeypatch: pytest.MonkeyPatch) -> FakeCompileSide:
    """Export, compile and golden check are fakes."""
    from build_harness import FakeCompileSide  # brings all that builds, which few tests need

    return FakeCompileSide.install(monkeypatch)


@pytest.fixture
def t0(tmp_path: Path) -> Path:
    """A tiny random checkpoint."""
    return tiny.write_tiny(tmp_path / "t0")
