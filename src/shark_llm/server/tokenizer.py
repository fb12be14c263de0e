"""Text to token ids and back, with the BOS rules that a server needs.

A prompt gets the BOS that the tokenizer puts in front by its own policy, exactly once: text that
already begins with it (a chat template wrote it, or the client did) gets no second one. The
tokenizer's closing EOS, where it has one, is left out: a prompt is there to be continued.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shark_llm.errors import ArtifactError
from shark_llm.server.chat_template import special_tokens

_SENTENCEPIECE_SPACE = "\u2581"


class PromptTokenizer:
    """A `tokenizers.Tokenizer` with its BOS policy worked out once."""

    def __init__(self, tokenizer: Tokenizer, config: Mapping[str, Any] | None = None) -> None:
        # Checkpoints carry the truncation and padding of their training; a prompt has neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.raw = tokenizer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._bos_ids = _bos_policy(tokenizer, config or {})
        self._byte_level = _is_byte_level(tokenizer)
        self._special_ids: dict[str, int] = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._skipped = frozenset(self._special_ids.values())

    @classmethod
    def from_files(cls, tokenizer_json: Path, config: Mapping[str, Any]) -> PromptTokenizer:
        """Read tokenizer.json.

        Raises:
            ArtifactError: the file is missing or not a tokenizer.
        """
        try:
            text = tokenizer_json.read_text(encoding="utf-8")
        except OSError as error:
            raise ArtifactError(
                f"{tokenizer_json.name} cannot be read: {error.strerror}; rebuild the bundle"
            ) from error
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception for every fault
            raise ArtifactError(
                f"{tokenizer_json.name} is not a tokenizer: {error}; rebuild the bundle"
            ) from error
        return cls(tokenizer, config)

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Ids of `text`, with `add_bos` behind one BOS if the tokenizer begins texts with it."""
        # encode_batch lets other threads run meanwhile; encode holds the interpreter lock, and with
        # it every stream and the engine, for 3 s per MB of text.
        ids: list[int] = self.raw.encode_batch([text], add_special_tokens=False)[0].ids
        if add_bos and ids[: len(self._bos_ids)] != self._bos_ids:
            ids = self._bos_ids + ids
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """Ids of a rendered chat template: never two BOS, even where the template wrote two."""
        ids = self.encode(text)
        width = len(self._bos_ids)
        while width and ids[width : 2 * width] == self._bos_ids:
            ids = ids[width:]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids beyond the vocabulary (padding rows of the matrix) have no text."""
        texts: list[str] = self.raw.decode_batch(
            [list(ids)], skip_special_tokens=skip_special_tokens
        )
        return texts[0]

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of generated text."""
        return token_id in self._skipped

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written so, or None."""
        return self._special_ids.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token as it stands in running text, special tokens by their name."""
        piece = self.raw.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            table = _byte_level_table()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(_SENTENCEPIECE_SPACE, " ").encode()

    def token_text(self, token_id: int) -> str:
        """One token for the eye. Part of a letter cannot be shown alone and reads U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def _bos_policy(tokenizer: Tokenizer, config: Mapping[str, Any]) -> list[int]:
    """The ids that the tokenizer puts before any text.

    An explicit `add_bos_token` in tokenizer_config.json wins over the post-processor, as it does
    for the tokenizers of transformers that know it.
    """
    bos = special_tokens(config).get("bos_token")
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    wanted = config.get("add_bos_token")
    if wanted is False:
        return []
    if wanted is True and bos_id is not None:
        return [bos_id]
    with_special: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    plain: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return with_special[:start]
    return []


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether pieces are written in the GPT-2 byte alphabet."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


@lru_cache(maxsize=1)
def _byte_level_table() -> dict[str, int]:
    """Character -> byte of the GPT-2 alphabet (`bytes_to_unicode` of openai/gpt-2, encoder.py).

    Printable Latin-1 stands for itself; the other bytes follow, in order, from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return table
