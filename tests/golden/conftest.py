"""Tiny checkpoints and their judges, written and loaded once per run of the golden tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ladder import Judge, write_kind
from shark_llm.sharding.apply import TORCH_DTYPES

Judged = Callable[[str, str], tuple[Path, Judge]]


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """(kind, dtype) -> the checkpoint's directory and transformers on it."""

    @cache
    def make(kind: str, dtype: str) -> tuple[Path, Judge]:
        directory = tmp_path_factory.mktemp(f"{kind}-{dtype}")
        write_kind(directory, kind, TORCH_DTYPES[dtype])
        return directory, Judge(directory)

    return make
