"""Tokenizers of the two families, made in memory: byte-level BPE and SentencePiece-like."""

from __future__ import annotations

from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = ("th", "he", "the", "am", "test", "ing", "testing", "ABC", "DEF", "..", "...", "ab", "abc")


def byte_level() -> Tokenizer:
    """GPT-2's kind: 256 bytes, some merges, and merges that cut letters in two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> str:
        merges.append((left, right))
        vocab.setdefault(left + right, len(vocab))
        return left + right

    for word in (*WORDS, "삼", "é", " a", " t", " 😀", "a é"):
        units = _bytes_to_letters(word)[:3]  # of " 😀" the space and half of the letter
        whole = units[0]
        for unit in units[1:]:
            if whole + unit in vocab:
                whole += unit
                continue
            whole = merge(whole, unit)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def sentencepiece(kind: Literal["llama", "metaspace"] = "llama") -> Tokenizer:
    """Llama 2's kind: ▁ for spaces, `<0x..>` for bytes without a token, first space dropped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJé.\ufffd"
    for piece in [*letters, "▁a", "▁b", "▁c", "▁x", "▁▁", "▁the", *WORDS]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True
        )
    )
    if kind == "llama":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
        )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def _bytes_to_letters(text: str) -> list[str]:
    """GPT-2's table: printable bytes stand for themselves, others for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in text.encode()]
