"""A model without its weights: config.json says the shapes, and every weight is the same number.

For planning, and for bundles with dummy weights: full-size shapes to compile and benchmark on a
machine that could not even store the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from shark_llm.artifacts.manifest import ByteProgress
from shark_llm.checkpoint.aux_files import eos_token_ids, load_json, read_aux_files
from shark_llm.checkpoint.fp8 import read_scheme
from shark_llm.checkpoint.names import expected_parameters
from shark_llm.checkpoint.source import ParameterInfo
from shark_llm.errors import CheckpointError
from shark_llm.model.config import config_from_hf

CONFIG_NAME = "config.json"
DUMMY_VALUE = 2.0**-7
"""Of every weight. Not zero, so that a benchmark has normal numbers to work on; small enough that
sums over the widest model stay finite in f16."""
DEFAULT_DTYPE = torch.float32
"""Of a config.json that names none, as in transformers."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ConfigOnlyCheckpoint:
    """A `Checkpoint` made of a config.json, whatever weights lie beside it.

    Embeddings are tied where the config says so; a checkpoint with weights may know better.
    """

    def __init__(self, path: Path) -> None:
        """`path` is a directory with a config.json, or a JSON file of that content.

        A tokenizer beside config.json comes along. Raises CheckpointError, UnsupportedModelError.
        """
        if path.is_dir() or path.name == CONFIG_NAME:
            directory = path if path.is_dir() else path.parent
            path = directory / CONFIG_NAME
            self.aux_files: Mapping[str, bytes] = read_aux_files(directory)
        else:
            self.aux_files = {CONFIG_NAME: _read(path)}
        self._path = path
        content = load_json(path, self.aux_files[CONFIG_NAME])
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: holds no JSON object: no model config")
        more = eos_token_ids(path.parent, self.aux_files)
        self.config = config_from_hf(read_scheme(content)[0], more_eos_token_ids=more)
        self.notes: tuple[str, ...] = ()
        dtype = _DTYPES.get(self.config.torch_dtype or "", DEFAULT_DTYPE)
        self.parameters: Mapping[str, ParameterInfo] = {
            name: ParameterInfo(shape=shape, dtype=dtype)
            for name, shape in expected_parameters(self.config).items()
        }

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start .. stop - 1 of dimension 0: DUMMY_VALUE throughout."""
        info = self.parameters[name]
        rows, *rest = info.shape
        assert 0 <= start <= stop <= rows, f"{name}: rows {start}..{stop} of {rows}"
        return torch.full((stop - start, *rest), DUMMY_VALUE, dtype=info.dtype)

    def extent(self, name: str) -> None:
        """Nowhere."""

    @property
    def quantized_as(self) -> str | None:
        return None  # all its weights are one number

    @property
    def weight_paths(self) -> tuple[Path, ...]:
        return (self._path,)

    def digest(self, progress: ByteProgress | None = None) -> str:
        """sha256 of config.json: what a model without weights is told from others by."""
        return hashlib.sha256(b"dummy weights\0" + self.aux_files[CONFIG_NAME]).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
