"""Log-probabilities in the two forms that OpenAI's endpoints have. Natural log, always finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shark_llm.engine.request import TokenEvent, TokenLogprobs
from shark_llm.server.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from shark_llm.server.text_stream import PromptLogprobs
from shark_llm.server.tokenizer import PromptTokenizer

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot write


def finite(logprob: float) -> float:
    """`logprob`, or -9999.0 for an impossible token (-inf) and for NaN."""
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


class CompletionLogprobsWriter:
    """The parallel lists of /v1/completions. Keeps the text offset from one chunk to the next."""

    def __init__(self, tokenizer: PromptTokenizer, *, with_top: bool) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._with_top = with_top

    def write(self, tokens: Sequence[TokenEvent]) -> CompletionLogprobs:
        """Entries for the next generated tokens."""
        result = CompletionLogprobs(top_logprobs=[] if self._with_top else None)
        for token in tokens:
            assert token.logprobs is not None
            self._add(result, token.token_id, token.logprobs)
        return result

    def write_prompt(self, ids: Sequence[int], logprobs: PromptLogprobs) -> CompletionLogprobs:
        """Entries for the echoed prompt, to be written before any other."""
        result = CompletionLogprobs(top_logprobs=[] if self._with_top else None)
        for token_id, found in zip(ids, logprobs, strict=True):
            self._add(result, token_id, found)
        return result

    def _add(self, result: CompletionLogprobs, token_id: int, found: TokenLogprobs | None) -> None:
        raw = self._tokenizer.token_bytes(token_id)
        text = raw.decode("utf-8", errors="replace")
        result.tokens.append(text)
        result.token_logprobs.append(None if found is None else finite(found.logprob))
        result.text_offset.append(self._offset)
        if not self._tokenizer.is_special(token_id):
            # Characters begun so far: of a letter split over tokens only the first byte counts.
            self._offset += sum(1 for byte in raw if byte & 0xC0 != 0x80)
        if result.top_logprobs is None:
            return
        if found is None:
            result.top_logprobs.append(None)
            return
        top: dict[str, float] = {}
        for other_id, logprob in found.top:
            top.setdefault(self._tokenizer.token_text(other_id), finite(logprob))
        top.setdefault(text, finite(found.logprob))
        result.top_logprobs.append(top)


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The entries of both, in order."""
    top = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        top = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=top,
        text_offset=first.text_offset + second.text_offset,
    )


def chat_logprobs(tokenizer: PromptTokenizer, tokens: Sequence[TokenEvent]) -> ChatLogprobs:
    """The objects of /v1/chat/completions; `bytes` is exact where `token` can only show U+FFFD."""
    content = []
    for token in tokens:
        assert token.logprobs is not None
        own = _entry(tokenizer, token.token_id, token.logprobs.logprob)
        top = [_entry(tokenizer, token_id, value) for token_id, value in token.logprobs.top]
        content.append(
            ChatTokenLogprob(
                token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top
            )
        )
    return ChatLogprobs(content=content)


def _entry(tokenizer: PromptTokenizer, token_id: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TopLogprob(
        token=raw.decode("utf-8", errors="replace"), logprob=finite(logprob), bytes=list(raw)
    )
