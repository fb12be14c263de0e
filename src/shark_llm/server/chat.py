"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from shark_llm.engine.request import TokenEvent
from shark_llm.errors import RequestError
from shark_llm.server.body import read_body
from shark_llm.server.calls import check_num_choices, choice_specs, run_call
from shark_llm.server.context import Context
from shark_llm.server.errors import shorten
from shark_llm.server.generation import Generation
from shark_llm.server.guidance import compile_grammar
from shark_llm.server.logprobs import chat_logprobs
from shark_llm.server.params import check_unsupported
from shark_llm.server.prompts import encode_chat
from shark_llm.server.protocol import CHAT_UNSUPPORTED, ChatCompletionRequest
from shark_llm.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    Usage,
)
from shark_llm.server.state import ServedModel
from shark_llm.server.text_stream import Finish
from shark_llm.server.token_ids import token_ids


async def chat_completions(context: Context, request: Request) -> Response:
    """Answer a conversation, n times."""
    limit = context.settings.max_body_bytes
    body = await read_body(request, ChatCompletionRequest, max_bytes=limit)
    served = context.state.model(body.model)
    _check(body)
    check_num_choices(body.choices_per_prompt(), context.settings.max_choices)
    grammar = await compile_grammar(served.grammars, body.grammar_source())
    fields = body if body.tool_choice != "none" else body.model_copy(update={"tools": None})
    specs = choice_specs(
        served,
        body,
        await encode_chat(served, fields),
        param="messages",
        count=body.choices_per_prompt(),
        max_tokens=body.token_limit(),
        min_tokens=body.min_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
    )
    return await run_call(
        context,
        request,
        served,
        specs,
        lambda generation: _Answer(body, served, generation),
        prefix="chatcmpl",
        names=body.names(),
        stream=bool(body.stream),
    )


def _check(body: ChatCompletionRequest) -> None:
    check_unsupported(body.model_extra or {}, CHAT_UNSUPPORTED)
    if body.best_of is not None and body.best_of != body.choices_per_prompt():
        raise RequestError(
            f"best_of is {body.best_of} and n is {body.choices_per_prompt()}; only "
            "/v1/completions chooses the best of several, leave best_of out",
            param="best_of",
            code="unsupported_parameter",
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise RequestError(
            f"tool_choice: only 'auto' and 'none' are supported, got {shorten(body.tool_choice)}; "
            "this server shows tools to the model but cannot force a call",
            param="tool_choice",
            code="unsupported_parameter",
        )


class _Answer:
    """Writes one generation as a whole answer or as a stream of chunks."""

    def __init__(
        self, body: ChatCompletionRequest, served: ServedModel, generation: Generation
    ) -> None:
        self._body = body
        self._served = served
        self._generation = generation
        self._created = int(time.time())

    async def whole(self) -> ChatCompletionResponse:
        choices = [
            ChatChoice(
                index=done.index,
                message=AssistantMessage(content=done.text),
                logprobs=self._logprobs(done.tokens),
                finish_reason=done.finish.finish_reason,
                stop_reason=done.finish.stop_reason,
                token_ids=self._ids(done.tokens, done.finish),
            )
            for done in await self._generation.collect()
        ]
        return ChatCompletionResponse(
            id=self._generation.request_id,
            created=self._created,
            model=self._served.name,
            choices=choices,
            usage=self._generation.usage(),
            prompt_token_ids=self._prompt_ids(),
        )

    async def chunks(self) -> AsyncGenerator[ChatCompletionChunk, None]:
        for index in range(self._body.choices_per_prompt()):
            role = ChatDelta(role="assistant", content="")
            choice = ChatChunkChoice(index=index, delta=role)
            chunk = self._chunk([choice], self._usage_so_far(index))
            chunk.prompt_token_ids = self._prompt_ids()
            yield chunk
        async for delta in self._generation.deltas():
            logprobs = self._logprobs(delta.tokens) if delta.tokens else None
            ids = self._ids(delta.tokens, delta.finish)
            if not (delta.text or delta.finish or logprobs or ids):
                continue  # tokens whose text is not final yet
            choice = ChatChunkChoice(
                index=delta.index,
                delta=ChatDelta(content=delta.text or None),
                logprobs=logprobs,
                token_ids=ids,
            )
            if delta.finish is not None:
                choice.finish_reason = delta.finish.finish_reason
                choice.stop_reason = delta.finish.stop_reason
            yield self._chunk([choice], self._usage_so_far(delta.index))
        if self._body.wants_usage_chunk():
            yield self._chunk([], self._generation.usage())

    def _usage_so_far(self, index: int) -> Usage | None:
        return self._generation.usage_of(index) if self._body.wants_usage_always() else None

    def _ids(self, tokens: Sequence[TokenEvent], finish: Finish | None) -> list[int] | None:
        return token_ids(tokens, finish) if self._body.return_token_ids else None

    def _prompt_ids(self) -> list[int] | None:
        return list(self._generation.prompt_ids(0)) if self._body.return_token_ids else None

    def _logprobs(self, tokens: Sequence[TokenEvent]) -> ChatLogprobs | None:
        return chat_logprobs(self._served.tokenizer, tokens) if self._body.logprobs else None

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._generation.request_id,
            created=self._created,
            model=self._served.name,
            choices=choices,
            usage=usage,
        )
