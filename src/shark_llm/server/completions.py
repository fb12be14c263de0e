"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from shark_llm.engine.request import TokenEvent
from shark_llm.server.body import read_body
from shark_llm.server.calls import check_num_choices, choice_specs, run_call
from shark_llm.server.context import Context
from shark_llm.server.generation import Completed, Generation
from shark_llm.server.guidance import compile_grammar
from shark_llm.server.logprobs import CompletionLogprobsWriter, finite, joined
from shark_llm.server.params import UNSUPPORTED, check_unsupported
from shark_llm.server.prompts import checked_ids, encode_text
from shark_llm.server.protocol import CompletionRequest
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
    check_unsupported(body.model_extra or {}, UNSUPPORTED)
    check_num_choices(len(body.prompt) * body.candidates_per_prompt(), context.settings.max_choices)
    specs = await _specs(body, served)
    echoes = _echoes(body, served)
    return await run_call(
        context,
        request,
        served,
        specs,
        lambda generation: _Answer(body, served, generation, echoes),
        prefix="cmpl",
        names=body.names(),
        stream=bool(body.stream),
    )


async def _specs(body: CompletionRequest, served: ServedModel) -> list[ChoiceSpec]:
    grammar = await compile_grammar(served.grammars, body.grammar_source())
    # To choose among candidates, the likelihood of each token must be known.
    logprobs = 0 if body.chooses_best() and body.logprobs is None else body.logprobs
    specs = []
    for index, prompt in enumerate(body.prompt):
        if isinstance(prompt, str):
            add_bos = body.add_special_tokens is not False
            ids = await encode_text(served, prompt, add_bos=add_bos, param="prompt")
        else:
            ids = checked_ids(served, prompt, param="prompt")
        specs += choice_specs(
            served,
            body,
            ids,
            prompt_index=index,
            param="prompt",
            count=body.candidates_per_prompt(),
            max_tokens=body.token_limit(),
            min_tokens=body.min_tokens,
            logprobs=logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            grammar=grammar,
        )
    return specs


def _echoes(body: CompletionRequest, served: ServedModel) -> list[str]:
    """What stands before each choice's text: the prompt with `echo`, else nothing."""
    texts = [""] * len(body.prompt)
    if body.echo:
        texts = [
            prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt)
            for prompt in body.prompt
        ]
    return [text for text in texts for _ in range(body.candidates_per_prompt())]


def _best(candidates: Sequence[Completed], count: int) -> list[Completed]:
    """The `count` candidates with the highest mean log-probability per token, best first.

    The token that ended a candidate counts too. It is the model's own probability, before penalties
    and temperature.
    """

    def mean_logprob(done: Completed) -> float:
        found = [token.logprobs for token in done.tokens] + [done.finish.stop_logprobs]
        values = [finite(each.logprob) for each in found if each is not None]
        return sum(values) / max(len(values), 1)

    return sorted(candidates, key=mean_logprob, reverse=True)[:count]


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
        completed = await self._generation.collect()
        if self._body.chooses_best():
            size, count = self._body.candidates_per_prompt(), self._body.choices_per_prompt()
            groups = [completed[i : i + size] for i in range(0, len(completed), size)]
            completed = [done for group in groups for done in _best(group, count)]
        choices = [
            CompletionChoice(
                index=index,
                text=self._echoes[done.index] + done.text,
                logprobs=self._logprobs(done.index, done.tokens, done.prompt_logprobs),
                finish_reason=done.finish.finish_reason,
                stop_reason=done.finish.stop_reason,
                token_ids=self._ids(done.tokens, done.finish),
                prompt_token_ids=self._prompt_ids(done.index),
            )
            for index, done in enumerate(completed)
        ]
        return self._response(choices, self._generation.usage())

    async def chunks(self) -> AsyncGenerator[CompletionResponse, None]:
        echoes = list(self._echoes)
        prompts = [self._prompt_ids(index) for index in range(len(echoes))]
        if self._body.logprobs is None:  # else the prompt goes out with what was made of it
            for index, echo in enumerate(echoes):
                if echo:
                    choice = CompletionChoice(index=index, text=echo)
                    yield self._response([choice], self._usage_so_far(index))
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
            yield self._response([choice], self._usage_so_far(delta.index))
        if self._body.wants_usage_chunk():
            yield self._response([], self._generation.usage())

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
