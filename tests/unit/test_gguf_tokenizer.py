"""The tokenizer rebuilt from a GGUF's metadata gives the ids that the model was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaTokenizer

from shark_llm.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_files
from shark_llm.checkpoint.open import open_checkpoint
from tiny import CHAT_TEMPLATE, tiny_config, tiny_tokenizer, tiny_weights
from tiny_gguf import write_tiny_gguf

TEXTS = [
    "Hello world! 123",
    "  multiple   spaces 3",
    "line\n\n\n  two\r\n\ttabs  ",
    "Café déjà vu. 漢字かな 한국어 🙂🚀",
    "don't I'll we've DON'T",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x=1; y = 22 + 333.5²½Ⅷ",
    "the other one in the end",
    "\u00a0\u3000 x\u200b",
    "   ",
    "\n",
    "",
]

# What SmolLM2's published tokenizer gives.
SMOLLM2_IDS = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "\n": [198],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "<|im_start|>\n<|im_end|>": [1, 198, 2],
}


def rebuilt(path: Path) -> Tokenizer:
    return Tokenizer.from_str(open_checkpoint(path).aux_files["tokenizer.json"].decode())


def test_smollm2_ids(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    tokenizer = Tokenizer.from_str(checkpoint.aux_files["tokenizer.json"].decode())
    for text, ids in SMOLLM2_IDS.items():
        assert tokenizer.encode(text).ids == ids, text
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    config = json.loads(checkpoint.aux_files["tokenizer_config.json"])
    assert config["bos_token"] == "<|im_start|>"
    assert config["eos_token"] == "<|im_end|>"
    assert config["add_bos_token"] is False
    assert checkpoint.aux_files["chat_template.jinja"].startswith(b"{% for message in messages %}")


def test_byte_level_bpe_is_the_tokenizer_it_was_made_from(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_tiny_gguf(tmp_path / "t.gguf", config, tiny_weights(config))
    tokenizer, original = rebuilt(path), tiny_tokenizer()
    for text in TEXTS:
        assert tokenizer.encode(text).ids == original.encode(text).ids, text
        ids = tokenizer.encode(text).ids[1:]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_transformers_reads_the_rebuilt_files(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_tiny_gguf(tmp_path / "t.gguf", config, tiny_weights(config))
    directory = tmp_path / "files"
    directory.mkdir()
    for name, content in open_checkpoint(path).aux_files.items():
        (directory / name).write_bytes(content)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer("the end").input_ids[0] == 1
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<s><|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", "Ġ1234", "Ġ", "Ġx"]),
        ("smollm", "it's 1234  x", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("llama-bpe", "IT'S 1234\n\n x", ["IT", "'S", "Ġ", "123", "4", "ĊĊ", "Ġx"]),
        ("tekken", "aBc 12/\n", ["a", "Bc", "Ġ", "1", "2", "/Ċ"]),
        ("deepseek-coder", "ab 12,\r\n", ["ab", "Ġ", "1", "2", ",", "č", "Ċ"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_model_does(
    tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    config = tiny_config()
    path = write_tiny_gguf(
        tmp_path / "t.gguf", config, tiny_weights(config), metadata={"tokenizer.ggml.pre": pre}
    )
    assert pre in PRE_TOKENIZERS
    cut = rebuilt(path).pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == pieces


@pytest.mark.parametrize(
    ("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("smollm", False)]
)
def test_bos_where_the_metadata_does_not_say(tmp_path: Path, pre: str, adds: bool) -> None:
    config = tiny_config()
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": ...}
    path = write_tiny_gguf(tmp_path / "t.gguf", config, tiny_weights(config), metadata=metadata)
    assert (rebuilt(path).encode("e").ids[0] == 1) == adds


def sentencepiece_metadata(**overrides: Any) -> dict[str, Any]:
    """A small vocabulary as sentencepiece's BPE makes it: scores fall in the order of merging."""
    pieces = ["▁t", "he", "▁the", "in", "▁a", "er", "▁the▁", "▁▁"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", ".", "é"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        *letters,
    ]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1e4] * len(letters)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | overrides


@pytest.mark.parametrize("text", ["the inner.", " a  the", "é ü 漢\n", "</s>the", "in the\ta", ""])
def test_sentencepiece_bpe(text: str) -> None:
    metadata = sentencepiece_metadata()
    files = tokenizer_files(Path("x.gguf"), metadata)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    ids = tokenizer.encode(text).ids
    assert ids[0] == 1  # llama.cpp adds BOS to this kind unless it says otherwise
    # As in llama.cpp, a special token starts a text anew, with a space before it.
    expected = text.replace("</s>", "</s> ")
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == expected
    assert 0 not in ids  # bytes cover what has no piece

    merges = [tuple(pair) for pair in json.loads(files["tokenizer.json"])["model"]["merges"]]
    tokens = metadata["tokenizer.ggml.tokens"]
    judge = LlamaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    if text and not text.startswith((" ", "<")):  # there the judge's Metaspace differs
        assert ids[1:] == judge.encode(text, add_special_tokens=False)


def test_sentencepiece_merges_in_the_order_of_scores() -> None:
    files = tokenizer_files(Path("x.gguf"), sentencepiece_metadata())
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("the a").tokens == ["<s>", "▁the", "▁a"]
    no_prefix = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    files = tokenizer_files(Path("x.gguf"), no_prefix)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("the a").tokens == ["<s>", "t", "he", "▁a"]
