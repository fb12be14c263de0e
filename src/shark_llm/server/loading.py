"""From an opened bundle to a model that can be served."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shark_llm.artifacts.manifest import Manifest
from shark_llm.engine.guidance import GrammarCompiler
from shark_llm.engine.loop import Engine
from shark_llm.engine.settings import EngineSettings
from shark_llm.errors import ArtifactError
from shark_llm.runtime.runner import ModelRunner
from shark_llm.server.chat_template import load_chat_template
from shark_llm.server.lifecycle import Loaded
from shark_llm.server.params import defaults_from_generation_config
from shark_llm.server.state import ServedModel
from shark_llm.server.tokenizer import PromptTokenizer


def start_engine(
    runner: ModelRunner,
    settings: EngineSettings,
    *,
    directory: Path,
    manifest: Manifest,
    served_model_name: str,
    notes: list[str],
) -> Loaded:
    """Read the tokenizer, the template and the sampling defaults, and start the engine.

    `notes` gets a line for everything that was found odd and put aside. The runner belongs to the
    engine afterwards, and is closed if this fails.

    Raises:
        ArtifactError: a file of the bundle is missing or not valid.
        UsageError: the engine's settings do not fit the runner.
    """
    try:
        tokenizer_config = read_json(directory / "tokenizer_config.json")
        tokenizer = PromptTokenizer.from_files(directory / "tokenizer.json", tokenizer_config)
        template = load_chat_template(_text(directory / "chat_template.jinja"), tokenizer_config)
        defaults, odd = defaults_from_generation_config(
            read_json(directory / "generation_config.json")
        )
        notes += odd
        grammars = _grammar_compiler(tokenizer, runner.vocab_size, manifest.eos_token_ids, notes)
        engine = Engine(runner, settings, eos_token_ids=manifest.eos_token_ids)
    except BaseException:
        runner.close()
        raise
    engine.start()
    served = ServedModel(
        name=served_model_name,
        engine=engine,
        tokenizer=tokenizer,
        chat_template=template,
        max_model_len=engine.max_model_len,
        vocab_size=runner.vocab_size,
        defaults=defaults,
        grammars=grammars,
    )
    pages = runner.num_pages - 1  # page 0 is scratch
    prefill, decode = (
        ",".join(map(str, sizes))
        for sizes in (runner.prefill_batch_sizes, runner.decode_batch_sizes)
    )
    summary = (
        f"model={served.name} max_model_len={served.max_model_len} "
        f"kv_tokens={pages * runner.page_size} prefill_bs={prefill} decode_bs={decode}"
    )
    return Loaded(served=served, summary=summary)


def _grammar_compiler(
    tokenizer: PromptTokenizer, vocab_size: int, eos_token_ids: Collection[int], notes: list[str]
) -> GrammarCompiler | None:
    eos = [token for token in eos_token_ids if 0 <= token < vocab_size]
    try:
        return GrammarCompiler(tokenizer.raw, vocab_size=vocab_size, eos_token_ids=eos)
    except ValueError as error:
        notes.append(f"tokenizer.json: structured output is off, the library refuses it: {error}")
        return None


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object of the bundle; a file that is not there is an empty one.

    Raises:
        ArtifactError: it is there and not a JSON object.
    """
    text = _text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{path.name} is not JSON: {error}; rebuild the bundle") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{path.name} is not a JSON object; rebuild the bundle")
    return value


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path.name} cannot be read: {error}; rebuild the bundle") from error
