"""From tokens to text while they come, and where the text has to stop.

Both run on the server's side, not on the engine thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
WINDOW = 16
"""Tokens that are decoded again at each push, at most twice so many."""
LONGEST_LETTER = 4
"""Bytes of the longest UTF-8 sequence; each token has at least one of them."""


class IncrementalDetokenizer:
    """The text of one output, in pieces that are final.

    Joined, the pieces are decode(prompt + output) without the decode(prompt) that it begins with,
    for every tokenizer whose decoder works from left to right. Text is held back while later tokens
    could change it:

    - byte-level BPE: bytes at the end that do not make a letter yet (decoded as one U+FFFD);
    - byte fallback (`<0xE2>`): a whole run of byte tokens, since its decoder replaces all bytes of
      a run if one of them does not fit.

    Only a window of the last tokens is decoded. Tokens without text (special ones) do not enter it.
    It begins with a token that is no byte, because the decoders of SentencePiece drop a space in
    front of the first one.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._has_byte_fallback = "ByteFallback" in repr(tokenizer.decoder)
        self._special: frozenset[int] | None = None
        self._ids = self._last_window(prompt_ids)
        self._in_byte_run = bool(self._ids) and self._is_byte(self._ids[-1])
        self._prompt_text: str | None = self._decode()
        """What the window said of the prompt alone; None after the first piece of output."""
        self._sent = len(self._prompt_text)
        """Characters of the window's text that were returned before, or belong to the prompt."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became final, often that of this token, or ''."""
        if self._is_skipped(token_id):
            return ""
        self._ids.append(token_id)
        self._in_byte_run = self._is_byte(token_id)
        if self._in_byte_run:
            return ""
        text = self._decode()
        end = len(text) - text.endswith(REPLACEMENT)
        delta = self._advance(text, end)
        if len(self._ids) >= 2 * WINDOW and self._prompt_text is None:
            self._ids = self._last_window(self._ids)
            # Whatever is held back at the end lies within the window, so it is as long there.
            self._sent = len(self._decode()) - (len(text) - self._sent)
        return delta

    def flush(self) -> str:
        """The output has ended: return what was held back. A letter cut in two is U+FFFD."""
        text = self._decode()
        return self._advance(text, len(text))

    def _advance(self, text: str, end: int) -> str:
        if self._prompt_text is not None:
            if not text.startswith(self._prompt_text):
                # The prompt ended inside a letter that the output completed.
                pairs = zip(text, self._prompt_text, strict=False)
                self._sent = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs))
            elif end <= self._sent:
                return ""
            self._prompt_text = None
        delta = text[self._sent : end]
        self._sent = max(self._sent, end)
        return delta

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)

    def _last_window(self, ids: Sequence[int]) -> list[int]:
        """The last ids with text, at least as many as a letter may be cut into, and not beginning
        inside a run of bytes."""
        window: list[int] = []
        for token_id in reversed(ids):
            if self._is_skipped(token_id):
                continue
            window.append(token_id)
            if len(window) >= LONGEST_LETTER and not self._is_byte(token_id):
                break
        window.reverse()
        return window

    def _is_byte(self, token_id: int) -> bool:
        if not self._has_byte_fallback:
            return False
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and len(token) == 6 and token[:3] == "<0x" and token[5] == ">"

    def _is_skipped(self, token_id: int) -> bool:
        """The token has no text: special, or beyond the tokenizer (padding of the vocabulary)."""
        if self._tokenizer.id_to_token(token_id) is None:
            return True
        if not self._skip_special_tokens:
            return False
        if self._special is None:
            added = self._tokenizer.get_added_tokens_decoder()
            self._special = frozenset(i for i, token in added.items() if token.special)
        return token_id in self._special


class StopMatcher:
    """Cuts a text that comes in pieces before the first stop string, or behind it.

    The first is the one that is complete first, and the longest of those that end together; so the
    result does not depend on how the text was cut into pieces. Text that could be the beginning of
    a stop string is held back until it is decided.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string"
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """Add text; return what may be shown of it and of what was held back."""
        if self.matched is not None:
            return ""
        text = self._held + text
        # A match that was complete before is none now: the held text has no stop string in it.
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include_stop else start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text has ended: return what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
