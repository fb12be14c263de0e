"""A Hugging Face directory: config.json beside model.safetensors, or beside indexed shards."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import torch

from shark_llm.artifacts.manifest import ByteProgress, digest_files
from shark_llm.checkpoint.aux_files import eos_token_ids, load_json, read_aux_files
from shark_llm.checkpoint.fp8 import FP8, Scaled, dequantize, read_scheme, take_scales
from shark_llm.checkpoint.names import IGNORED, check_weight_map, from_hf_name
from shark_llm.checkpoint.safetensors_file import DTYPE_BITS, TensorLocation, read_header
from shark_llm.checkpoint.source import FileExtent, ParameterInfo, iter_row_blocks, read_at
from shark_llm.errors import CheckpointError
from shark_llm.model.config import ModelConfig, config_from_hf

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsCheckpoint:
    """A `Checkpoint` in a Hugging Face directory.

    Opening reads config.json first, then the headers of the weight files; weights are read row by
    row when asked for. Raises CheckpointError, UnsupportedModelError or WeightMapError.
    """

    config: ModelConfig
    parameters: Mapping[str, ParameterInfo]
    aux_files: Mapping[str, bytes]
    notes: tuple[str, ...]

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._notes: list[str] = []
        self.aux_files = read_aux_files(directory)
        config_path = directory / "config.json"
        hf_config = load_json(config_path, self.aux_files["config.json"])
        if not isinstance(hf_config, dict):
            raise CheckpointError(f"{config_path}: holds no JSON object: no model config")
        plain_config, scheme = read_scheme(hf_config)
        config = config_from_hf(
            plain_config, more_eos_token_ids=eos_token_ids(directory, self.aux_files)
        )

        self._files, listed = self._weight_files()
        tensors = self._read_headers(listed)
        scaled: dict[str, Scaled] = {}
        if scheme is not None:
            tensors, scaled, notes = take_scales(str(directory), tensors, scheme)
            self._notes += notes
        self._locations: dict[str, TensorLocation] = {}
        unknown: list[str] = []
        for hf_name, location in tensors.items():
            name = from_hf_name(hf_name)
            if name is not None:
                self._locations[name] = location
            elif not IGNORED.fullmatch(hf_name):
                unknown.append(hf_name)
        self._scaled = {name: scaled[hf] for hf in scaled if (name := from_hf_name(hf)) is not None}
        self._refuse_dtypes({n: t for n, t in tensors.items() if n not in scaled}, unknown)
        if config.tie_word_embeddings:
            config = self._resolve_tied_head(config)
        check_weight_map(
            str(directory),
            config,
            {name: location.shape for name, location in self._locations.items()},
            unknown,
        )
        self.config = config
        self.parameters = self._parameter_infos()
        self._note_dtype()
        self.notes = tuple(self._notes)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start .. stop - 1 of dimension 0, in the tensor's own dtype, in fresh memory.

        FP8 matrices come as f32.
        """
        info = self.parameters[name]
        rows, *rest = info.shape
        assert 0 <= start <= stop <= rows, f"{name}: rows {start}..{stop} of {rows}"
        scaled = self._scaled.get(name)
        if scaled is None:
            data = _read_rows(self._locations[name], start, stop)
            return data.view(info.dtype).reshape(stop - start, *rest)
        scale = read_at(scaled.scale.path, scaled.scale.offset, _num_bytes(scaled.scale))
        return dequantize(
            _read_rows(scaled.weight, start, stop).reshape(stop - start, *rest),
            scale.view(DTYPES[scaled.scale.dtype]),
            start=start,
            block=scaled.block,
        )

    def extent(self, name: str) -> FileExtent | None:
        """Where the parameter lies; None for an FP8 matrix."""
        if name in self._scaled:
            return None
        location = self._locations[name]
        return FileExtent(path=location.path, offset=location.offset)

    @property
    def quantized_as(self) -> str | None:
        return FP8 if self._scaled else None

    @property
    def weight_paths(self) -> tuple[Path, ...]:
        return tuple(self._files)

    def digest(self, progress: ByteProgress | None = None) -> str:
        """sha256 over name, size and content of each weight file, in the order of their names.

        The headers are part of the content, and with them names, shapes and dtypes.
        """
        names = {path.relative_to(self._directory).as_posix() for path in self._files}
        whole = hashlib.sha256()
        for name, info in digest_files(self._directory, names, progress).items():
            whole.update(f"{name}\0{info.size}\0{info.sha256}\n".encode())
        return whole.hexdigest()

    def _weight_files(self) -> tuple[list[Path], dict[str, Path] | None]:
        """The files to read, and what the index (if there is one) says of each tensor."""
        single, index = self._directory / SINGLE_NAME, self._directory / INDEX_NAME
        if not index.exists():
            return [single], None
        content = load_json(index, index.read_bytes())
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: has no weight_map, or an empty one: download it again")
        bad = sorted({str(name) for name in weight_map.values() if not _is_inside(name)})
        if bad:
            raise CheckpointError(f"{index}: names files outside its directory: {', '.join(bad)}")
        listed = {tensor: self._directory / name for tensor, name in weight_map.items()}
        files = sorted(set(listed.values()))
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{self._directory}: {len(missing)} of {len(files)} weight files that"
                f" {INDEX_NAME} names are not there: {', '.join(missing)}; complete the download"
            )
        if single.exists() and single not in files:
            self._notes.append(f"{single} is not read: {INDEX_NAME} does not name it")
        return files, listed

    def _read_headers(self, listed: dict[str, Path] | None) -> dict[str, TensorLocation]:
        tensors: dict[str, TensorLocation] = {}
        for path in self._files:
            for name, location in read_header(path).items():
                if name in tensors:
                    raise CheckpointError(
                        f"{self._directory}: {name} stands in {tensors[name].path.name} and again"
                        f" in {path.name}: remove one of them"
                    )
                tensors[name] = location
        if listed is not None:
            absent = [
                f"{name} (in {path.name})"
                for name, path in listed.items()
                if name not in tensors or tensors[name].path != path
            ]
            if absent:
                raise CheckpointError(
                    f"{self._directory / INDEX_NAME}: names {len(absent)} tensors that their files"
                    f" do not hold: {', '.join(absent)}; index and shards are not of the same model"
                )
            unlisted = [name for name in tensors if name not in listed]
            if unlisted:
                # As transformers does: the index says which files to read, the files what is in
                # them.
                self._notes.append(f"in the shards but not in {INDEX_NAME}: {', '.join(unlisted)}")
        return tensors

    def _refuse_dtypes(self, tensors: Mapping[str, TensorLocation], unknown: list[str]) -> None:
        unfit = [
            f"{name} ({location.dtype})"
            for name, location in tensors.items()
            if location.dtype not in DTYPES and (from_hf_name(name) or name in unknown)
        ]
        if unfit:
            raise CheckpointError(
                f"{self._directory}: {len(unfit)} tensors of dtypes other than"
                f" {', '.join(DTYPES)}: {', '.join(unfit)}; use the unquantized model"
            )

    def _resolve_tied_head(self, config: ModelConfig) -> ModelConfig:
        """Tied by config, though the file may hold a head: as transformers 5 does (`tie_weights`).

        Only one of the two matrices there: it serves as both. Both and equal: tied. Both and
        different: the config is wrong, both are kept.
        """
        head = self._locations.get("output.weight")
        embedding = self._locations.get("token_embd.weight")
        if head is None:
            return config
        if embedding is None:
            self._notes.append("lm_head.weight also serves as the token embedding: they are tied")
            self._locations["token_embd.weight"] = self._locations.pop("output.weight")
            return config
        self.parameters = self._parameter_infos()
        if (head.shape, head.dtype) == (embedding.shape, embedding.dtype) and all(
            torch.equal(block.view(torch.uint8), other.view(torch.uint8))
            for block, other in zip(
                iter_row_blocks(self, "output.weight"),
                iter_row_blocks(self, "token_embd.weight"),
                strict=True,
            )
        ):
            del self._locations["output.weight"]
            return config
        self._notes.append(
            "config.json says tie_word_embeddings = true, but lm_head.weight differs from"
            " model.embed_tokens.weight: both are used, as transformers does"
        )
        return dataclasses.replace(config, tie_word_embeddings=False)

    def _parameter_infos(self) -> dict[str, ParameterInfo]:
        return {
            name: ParameterInfo(
                shape=location.shape,
                dtype=torch.float32 if name in self._scaled else DTYPES[location.dtype],
            )
            for name, location in self._locations.items()
        }

    def _note_dtype(self) -> None:
        says = self.config.torch_dtype
        plain = [i.dtype for name, i in self.parameters.items() if name not in self._scaled]
        stored = Counter(plain).most_common(1)[0][0]
        if says is not None and f"torch.{says}" != str(stored):
            self._notes.append(
                f"config.json says dtype {says}, but the tensors are"
                f" {str(stored).removeprefix('torch.')}: the tensors' own dtype counts"
            )


def _num_bytes(location: TensorLocation) -> int:
    return math.prod(location.shape) * DTYPE_BITS[location.dtype] // 8


def _read_rows(location: TensorLocation, start: int, stop: int) -> torch.Tensor:
    """The bytes of rows start .. stop - 1 of dimension 0."""
    row_bytes = _num_bytes(location) // location.shape[0]
    return read_at(location.path, location.offset + start * row_bytes, (stop - start) * row_bytes)


def _is_inside(file_name: object) -> bool:
    if not isinstance(file_name, str) or not file_name:
        return False
    path = PurePosixPath(file_name)
    return not path.is_absolute() and ".." not in path.parts
