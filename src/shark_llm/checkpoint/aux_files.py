"""The small files beside the weights: configs, tokenizer, chat template; their EOS ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shark_llm.errors import CheckpointError

AUX_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def read_aux_files(directory: Path) -> dict[str, bytes]:
    """Those of the small files that are there, as bytes. config.json must be."""
    files = {name: directory / name for name in AUX_NAMES}
    if not files["config.json"].is_file():
        raise CheckpointError(f"{directory}: has no config.json: no Hugging Face checkpoint")
    return {name: path.read_bytes() for name, path in files.items() if path.is_file()}


def load_json(path: Path, content: bytes) -> Any:
    """Parse a JSON file; an object with a key twice is an error too. Raises CheckpointError."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ValueError(f"stands twice in one object: {', '.join(twice)}")
        return dict(pairs)

    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no valid JSON ({error}): download it again") from error


def eos_token_ids(directory: Path, aux_files: Mapping[str, bytes]) -> tuple[int, ...]:
    """The EOS ids of generation_config.json, then that of the tokenizer's `eos_token`.

    A turn's end is often named in one of them only, so `ModelConfig.eos_token_ids` unites them with
    config.json's own.
    """
    ids: list[int] = []
    if "generation_config.json" in aux_files:
        path = directory / "generation_config.json"
        generation = load_json(path, aux_files["generation_config.json"])
        value = generation.get("eos_token_id") if isinstance(generation, dict) else None
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in listed):
            raise CheckpointError(
                f"{path}: eos_token_id = {value!r}: must be one token id or a list"
            )
        ids += listed
    if "tokenizer_config.json" in aux_files and "tokenizer.json" in aux_files:
        path = directory / "tokenizer_config.json"
        tokenizer_config = load_json(path, aux_files["tokenizer_config.json"])
        token = tokenizer_config.get("eos_token") if isinstance(tokenizer_config, dict) else None
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            tokenizer = load_json(directory / "tokenizer.json", aux_files["tokenizer.json"])
            token_id = _token_id(tokenizer, token)
            for added_id, added in (tokenizer_config.get("added_tokens_decoder") or {}).items():
                if token_id is None and added.get("content") == token:
                    token_id = int(added_id)
            if token_id is None:
                raise CheckpointError(
                    f"{path}: eos_token {token!r} is no token of tokenizer.json:"
                    " one of them is stale"
                )
            ids.append(token_id)
    return tuple(ids)


def _token_id(tokenizer: Any, token: str) -> int | None:
    """The id of a token in a parsed tokenizer.json: an added one, or one of the vocabulary."""
    if not isinstance(tokenizer, dict):
        return None
    for added in tokenizer.get("added_tokens") or []:
        if added.get("content") == token:
            return int(added["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, dict):
        return vocab.get(token)
    pieces = [piece for piece, _score in vocab]  # Unigram: a list of [piece, score]
    return pieces.index(token) if token in pieces else None
