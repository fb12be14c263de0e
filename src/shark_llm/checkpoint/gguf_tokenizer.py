"""tokenizer.json, tokenizer_config.json and the chat template, rebuilt from a GGUF's metadata.

A GGUF holds the vocabulary, the merges or scores, and the name of the pre-tokenizer. What the name
means is fixed by llama.cpp (src/llama-vocab.cpp); how it is written for the tokenizers library
follows the tokenizer.json of the models that the names stand for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from shark_llm.errors import CheckpointError

# GGUF token types
CONTROL, USER_DEFINED, BYTE = 3, 4, 6

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_CODER_SPLITS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How text is cut before merging: each pattern in turn isolates its matches.

    `gpt2` then applies GPT-2's own pattern. `whole_words`: a piece that is a token as it stands is
    not merged from parts. `adds_bos` when the metadata does not say.
    """

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_LLAMA3 = PreTokenizer(splits=(LLAMA3_SPLIT,), whole_words=True, adds_bos=True)
_DIGITS = PreTokenizer(splits=(r"\p{N}",), gpt2=True)
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(gpt2=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": PreTokenizer(splits=(LLAMA3_SPLIT,)),
    "tekken": PreTokenizer(splits=(TEKKEN_SPLIT,), whole_words=True, adds_bos=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "deepseek-coder": PreTokenizer(splits=DEEPSEEK_CODER_SPLITS),
}


def tokenizer_files(path: Path, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the tokenizer, by name. Raises CheckpointError on a kind that is not known."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{path}: holds no tokenizer.ggml.tokens: convert it again")
    if len(set(tokens)) < len(tokens):
        twice = sorted({token for token in tokens if tokens.count(token) > 1})[:5]
        raise CheckpointError(f"{path}: tokens that stand twice: {twice}: convert it again")
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if model not in builders:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model = {model!r}, supported are {', '.join(builders)}"
        )
    tokenizer, adds_bos = builders[model](path, metadata, tokens)
    _add_special_tokens(tokenizer, metadata, tokens)
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    special = {
        name: tokens[token_id]
        for name, token_id in special_token_ids(metadata).items()
        if 0 <= token_id < len(tokens)
    }
    _add_template(path, tokenizer, special, adds_bos, adds_eos)
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("llama.context_length"),
        **{f"{name}_token": token for name, token in special.items()},
    }
    files = {"tokenizer.json": tokenizer.to_str(pretty=False).encode()}
    template = metadata.get("tokenizer.chat_template")
    if template:
        tokenizer_config["chat_template"] = template
        files["chat_template.jinja"] = template.encode()
    files["tokenizer_config.json"] = (json.dumps(tokenizer_config, indent=2) + "\n").encode()
    return files


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """bos, eos, unk and pad ids, those that the metadata names."""
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _byte_level_bpe(
    path: Path, metadata: Mapping[str, Any], tokens: list[str]
) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre = {name!r}, supported are {', '.join(PRE_TOKENIZERS)}:"
            " convert the model again, or use its safetensors"
        )
    pre = PRE_TOKENIZERS[name]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [
        (left, right)
        for left, _, right in (
            merge.partition(" ") for merge in metadata.get("tokenizer.ggml.merges") or []
        )
    ]
    unfit = [pair for pair in merges if any(p not in vocab for p in (*pair, "".join(pair)))]
    if not merges or unfit:
        raise CheckpointError(
            f"{path}: {len(unfit)} of {len(merges)} merges name no tokens ({unfit[:3]}):"
            " convert it again"
        )
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _sentencepiece_bpe(
    path: Path, metadata: Mapping[str, Any], tokens: list[str]
) -> tuple[Tokenizer, bool]:
    """Llama 2's kind: a space is "▁", unknown characters fall back to bytes <0x00> .. <0xFF>."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.scores does not fit the tokens: convert it")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    # sentencepiece merges the neighbours whose joint piece scores best; tokenizers wants the pairs
    # in that order. A stable sort keeps pairs of one piece in the order of their left parts.
    pairs = sorted(
        (
            (-scores[token_id], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
            for token_id, token in enumerate(tokens)
            if kinds[token_id] not in (CONTROL, USER_DEFINED, BYTE)
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ),
    )
    unknown = special_token_ids(metadata).get("unk", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in pairs],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), spaces] if prefix else [spaces]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1)] if prefix else []),
        ]
    )
    return tokenizer, True


def _add_special_tokens(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]
) -> None:
    """Control tokens are matched whole and are special; user-defined ones are matched whole."""
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _add_template(
    path: Path, tokenizer: Tokenizer, special: Mapping[str, str], adds_bos: bool, adds_eos: bool
) -> None:
    """A post-processor that puts BOS before and EOS after a text, where the model wants them."""
    adds = [name for name, on in (("bos", adds_bos), ("eos", adds_eos)) if on]
    missing = [name for name in adds if name not in special]
    if missing:
        raise CheckpointError(
            f"{path}: the tokenizer adds {' and '.join(missing)}, but names no such token"
        )
    bos = [special["bos"]] if adds_bos else []
    eos = [special["eos"]] if adds_eos else []
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*bos, *eos}],
        )
