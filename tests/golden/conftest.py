"""Tiny checkpoints and their judges, written and loaded once per run of the golden tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

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


@pytest.fixture(autouse=True, scope="package")
def _one_torch_thread() -> Iterator[None]:
    """Tiny products are no work for two threads, which on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
