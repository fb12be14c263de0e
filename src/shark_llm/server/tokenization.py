"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from shark_llm.errors import RequestError
from shark_llm.server.body import read_body
from shark_llm.server.context import Context
from shark_llm.server.params import Strict, check_token_ids
from shark_llm.server.prompts import encode_chat, encode_plain
from shark_llm.server.protocol import ChatFields


class TokenizeRequest(ChatFields):
    """Either `prompt`, or `messages` with what a chat request would send."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    prompt: str


async def tokenize(context: Context, request: Request) -> Response:
    """The ids that a completion or a chat would be prompted with."""
    body = await read_body(request, TokenizeRequest, max_bytes=context.settings.max_body_bytes)
    served = context.state.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(
            "prompt: send either prompt or messages", param="prompt", code="invalid_value"
        )
    if body.prompt is not None:
        add_bos = body.add_special_tokens is not False
        ids = await encode_plain(served, body.prompt, add_bos=add_bos)
    else:
        ids = await encode_chat(served, body, any_length=True)

    def write() -> str:
        answer = TokenizeResponse(count=len(ids), max_model_len=served.max_model_len, tokens=ids)
        if body.return_token_strs:
            answer.token_strs = [served.tokenizer.token_text(token_id) for token_id in ids]
        return answer.model_dump_json()

    return Response(await asyncio.to_thread(write), media_type="application/json")


async def detokenize(context: Context, request: Request) -> Response:
    """The text of ids, special tokens by their names."""
    body = await read_body(request, DetokenizeRequest, max_bytes=context.settings.max_body_bytes)
    served = context.state.model(body.model)
    check_token_ids(body.tokens, "tokens", max(served.vocab_size, served.tokenizer.vocab_size))
    text = await asyncio.to_thread(served.tokenizer.decode, body.tokens, skip_special_tokens=False)
    answer = DetokenizeResponse(prompt=text)
    return Response(answer.model_dump_json(), media_type="application/json")
