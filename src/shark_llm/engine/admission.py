"""What is refused before it enters the engine, because no waiting would ever help."""

from __future__ import annotations

from collections.abc import Iterable

from shark_llm.engine.request import Request
from shark_llm.errors import RequestError


def check_request(request: Request, *, vocab_size: int, max_model_len: int) -> None:
    """Raise `RequestError` (400) for a request that could never run, or would hurt others.

    The server checks its own fields with their own names; this is what the engine relies on.
    """
    params = request.sampling
    num_tokens = len(request.prompt_ids)
    if not num_tokens:
        raise RequestError(
            "the prompt is empty; it must have at least one token",
            param="prompt",
            code="invalid_value",
        )
    _check_ids(request.prompt_ids, vocab_size, "prompt")
    _check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    _check_ids(params.logit_bias, vocab_size, "logit_bias")
    if params.max_tokens < 0:
        raise RequestError(
            f"max_tokens is {params.max_tokens}; it must be at least 0",
            param="max_tokens",
            code="invalid_value",
        )
    if num_tokens + params.max_tokens > max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens and max_tokens is {params.max_tokens}, together "
            f"{num_tokens + params.max_tokens}; this server holds at most {max_model_len}: "
            "shorten the prompt or lower max_tokens",
            param="max_tokens" if num_tokens < max_model_len else "prompt",
            code="context_length_exceeded",
        )


def _check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{param} has the token id {token}; the vocabulary ends at {vocab_size - 1}",
                param=param,
                code="invalid_value",
            )
