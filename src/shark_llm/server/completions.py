"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from shark_llm.engine.request import TokenEvent
from shark_llm.errors import RequestError
from shark_llm.server import sse
from shark_llm.server.body import read_body
from shark_llm.server.context import Context
from shark_llm.server.errors import error_body
from shark_llm.server.generation import Generation, GenerationFailed
from shark_llm.server.logprobs import CompletionLogprobsWriter, joined
from shark_llm.server.params import UNSUPPORTED, check_unsupported, sampling_params
from shark_llm.server.prompts import checked_ids, encode_text, special_stops, token_budget
from shark_llm.server.protocol import (
    CompletionRequest,
    GenerationRequest,
)
from shark_llm.server.responses import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Usage,
)
from shark_llm.server.state import ServedModel
from shark_llm.server.text_stream import ChoiceSpec, Finish, PromptLogprobs
from shark_llm.server.token_ids import token_ids


async def completions(context: Context, request: Request) -> Response:
    """Continue one or several prompts, n times each."""
    body = await read_body(request, CompletionRequest, max_bytes=context.settings.max_body_bytes)
    served = context.state.model(body.model)
    _check(body)
    specs = await _specs(body, served, context.settings.max_choices)
    generation = context.begin(request, served, specs, prefix="cmpl", names=body.names())
    answer = _Answer(body, served, generation, _echoes(body, served, specs))
    if body.stream:
        return sse.EventStream(answer.events(), on_close=generation.close)
    try:
        whole = await sse.unless_disconnected(request.receive, answer.whole())
    finally:
        generation.close()
    return Response(whole.model_dump_json(), media_type="application/json")


def check_generation_request(body: GenerationRequest) -> None:
    """Refuse what no OpenAI endpoint of this server does.

    Raises:
        RequestError: 400 `unsupported_parameter`.
    """
    if body.response_format is not None and body.response_format.type != "text":
        raise RequestError(
            "response_format: only {'type': 'text'} is supported by this server; leave it out",
            param="response_format",
            code="unsupported_parameter",
        )
    if body.best_of is not None and body.best_of != body.choices_per_prompt():
        raise RequestError(
            f"best_of is {body.best_of} and n is {body.choices_per_prompt()}; choosing the best of "
            "several is not supported by this server, leave best_of out",
            param="best_of",
            code="unsupported_parameter",
        )


def check_num_choices(prompts: int, per_prompt: int, limit: int) -> None:
    """Bound the fan-out of one call."""
    if prompts * per_prompt > limit:
        raise RequestError(
            f"{prompts} prompts with n = {per_prompt} are {prompts * per_prompt} choices, at most "
            f"{limit} fit into one call; send several",
            param="prompt",
            code="invalid_value",
        )


def _check(body: CompletionRequest) -> None:
    check_unsupported(body.model_extra or {}, UNSUPPORTED)
    check_generation_request(body)


async def _specs(
    body: CompletionRequest, served: ServedModel, max_choices: int
) -> list[ChoiceSpec]:
    per_prompt = body.choices_per_prompt()
    check_num_choices(len(body.prompt), per_prompt, max_choices)
    stop_tokens = special_stops(served, body)
    specs = []
    for index, prompt in enumerate(body.prompt):
        if isinstance(prompt, str):
            add_bos = body.add_special_tokens is not False
            ids = await encode_text(served, prompt, add_bos=add_bos, param="prompt")
        else:
            ids = checked_ids(served, prompt, param="prompt")
        budget = token_budget(served, len(ids), body.token_limit(), param="prompt")
        for choice in range(per_prompt):
            sampling = sampling_params(
                body,
                max_tokens=budget,
                min_tokens=body.min_tokens or 0,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
                defaults=served.defaults,
                vocab_size=served.vocab_size,
                extra_stop_ids=stop_tokens,
                choice=choice,
            )
            specs.append(
                ChoiceSpec(
                    prompt_index=index,
                    prompt_ids=tuple(ids),
                    sampling=sampling,
                    stop=body.stop,
                    include_stop=bool(body.include_stop_str_in_output),
                    stop_tokens=stop_tokens,
                )
            )
    return specs


def _echoes(body: CompletionRequest, served: ServedModel, specs: Sequence[ChoiceSpec]) -> list[str]:
    """What stands before each choice's text: the prompt with `echo`, else nothing."""
    if not body.echo:
        return [""] * len(specs)
    texts = [
        prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt)
        for prompt in body.prompt
    ]
    return [texts[spec.prompt_index] for spec in specs]


class _Answer:
    """Writes one generation as a whole answer or as a stream of chunks."""

    def __init__(
        self,
        body: CompletionRequest,
        served: ServedModel,
        generation: Generation,
        echoes: Sequence[str],
    ) -> None:
        self._body = body
        self._served = served
        self._generation = generation
        self._echoes = echoes
        self._created = int(time.time())
        self._writers = [
            CompletionLogprobsWriter(served.tokenizer, with_top=bool(body.logprobs)) for _ in echoes
        ]

    async def whole(self) -> CompletionResponse:
        choices = [
            CompletionChoice(
                index=done.index,
                text=self._echoes[done.index] + done.text,
                logprobs=self._logprobs(done.index, done.tokens, done.prompt_logprobs),
                finish_reason=done.finish.finish_reason,
                stop_reason=done.finish.stop_reason,
                token_ids=self._ids(done.tokens, done.finish),
                prompt_token_ids=self._prompt_ids(done.index),
            )
            for done in await self._generation.collect()
        ]
        return self._response(choices, self._generation.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            echoes = list(self._echoes)
            prompts = [self._prompt_ids(index) for index in range(len(echoes))]
            if self._body.logprobs is None:  # else the prompt goes out with what was made of it
                for index, echo in enumerate(echoes):
                    if echo:
                        choice = CompletionChoice(index=index, text=echo)
                        yield sse.event(self._response([choice], self._usage_so_far(index)))
                echoes = [""] * len(echoes)
            async for delta in self._generation.deltas():
                logprobs = self._logprobs(delta.index, delta.tokens, delta.prompt_logprobs)
                text, echoes[delta.index] = echoes[delta.index] + delta.text, ""
                ids = self._ids(delta.tokens, delta.finish)
                has_tokens = bool(ids or (logprobs and logprobs.tokens))
                if not text and delta.finish is None and not has_tokens:
                    continue  # tokens whose text is not final yet
                choice = CompletionChoice(
                    index=delta.index, text=text, logprobs=logprobs, token_ids=ids
                )
                # The prompt's come with the first chunk alone.
                choice.prompt_token_ids, prompts[delta.index] = prompts[delta.index], None
                if delta.finish is not None:
                    choice.finish_reason = delta.finish.finish_reason
                    choice.stop_reason = delta.finish.stop_reason
                yield sse.event(self._response([choice], self._usage_so_far(delta.index)))
            if self._body.wants_usage_chunk():
                yield sse.event(self._response([], self._generation.usage()))
        except GenerationFailed as error:
            yield sse.event(error_body(str(error), status=error.status, code=error.code))
            return
        yield sse.DONE

    def _usage_so_far(self, index: int) -> Usage | None:
        return self._generation.usage_of(index) if self._body.wants_usage_always() else None

    def _ids(self, tokens: Sequence[TokenEvent], finish: Finish | None) -> list[int] | None:
        return token_ids(tokens, finish) if self._body.return_token_ids else None

    def _prompt_ids(self, index: int) -> list[int] | None:
        return list(self._generation.prompt_ids(index)) if self._body.return_token_ids else None

    def _logprobs(
        self, index: int, tokens: Sequence[TokenEvent], prompt: PromptLogprobs | None
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        writer = self._writers[index]
        if prompt is None:
            return writer.write(tokens)
        of_prompt = writer.write_prompt(self._generation.prompt_ids(index), prompt)
        return joined(of_prompt, writer.write(tokens))

    def _response(
        self, choices: list[CompletionChoice], usage: Usage | None = None
    ) -> CompletionResponse:
        return CompletionResponse(
            id=self._generation.request_id,
            created=self._created,
            model=self._served.name,
            choices=choices,
            usage=usage,
        )
