"""POST /generate: the form of sglang and of shortfin, the server that this one follows.

One prompt (a string, or a list of ids) gets one object, a list of prompts (or n > 1) gets a list:

    {"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", ...}}

Streams repeat the text from its beginning in every event, as sglang does. A request written in
shortfin's names (`max_completion_tokens` in its sampling_params) gets shortfin's answer:

    {"responses": [{"prompt", "responses": [{"text"}]}]}
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from shark_llm.engine.request import TokenEvent
from shark_llm.server.body import read_body
from shark_llm.server.calls import check_num_choices, choice_specs, run_call
from shark_llm.server.context import Context
from shark_llm.server.generate_protocol import (
    GENERATE_UNSUPPORTED,
    SAMPLING_UNSUPPORTED,
    GeneratedText,
    GenerateOutput,
    GenerateRequest,
    GenerateResponse,
    GenerateSampling,
    Ids,
    MetaInfo,
    PromptResponse,
    ShortfinResponse,
)
from shark_llm.server.generation import Generation
from shark_llm.server.guidance import compile_grammar
from shark_llm.server.logprobs import finite
from shark_llm.server.params import check_unsupported
from shark_llm.server.prompts import checked_ids, encode_text
from shark_llm.server.state import ServedModel
from shark_llm.server.text_stream import ChoiceSpec, Finish


async def generate(context: Context, request: Request) -> Response:
    """Continue prompts, in the form of the older servers."""
    body = await read_body(request, GenerateRequest, max_bytes=context.settings.max_body_bytes)
    served = context.state.model()
    check_unsupported(body.model_extra or {}, GENERATE_UNSUPPORTED)
    samplings = body.sampling()
    for sampling in samplings:
        check_unsupported(sampling.model_extra or {}, SAMPLING_UNSUPPORTED)
    check_num_choices(sum(each.n or 1 for each in samplings), context.settings.max_choices)
    specs: list[ChoiceSpec] = []
    for index, (prompt, sampling) in enumerate(zip(body.prompts(), samplings, strict=True)):
        specs += await _specs(body, served, index, prompt, sampling)
    return await run_call(
        context,
        request,
        served,
        specs,
        lambda generation: _Answer(body, served, generation, specs),
        prefix="gen",
        names=body.rid if isinstance(body.rid, list) else [body.rid] if body.rid else [],
        stream=bool(body.stream),
        exclude_none=True,
    )


async def _specs(
    body: GenerateRequest,
    served: ServedModel,
    index: int,
    prompt: str | Ids,
    sampling: GenerateSampling,
) -> list[ChoiceSpec]:
    param = "text" if isinstance(prompt, str) else "input_ids"
    grammar = await compile_grammar(served.grammars, sampling.grammar_source())
    if isinstance(prompt, str):
        ids = await encode_text(served, prompt, add_bos=True, param=param)
    else:
        ids = checked_ids(served, prompt, param=param)
    return choice_specs(
        served,
        sampling,
        ids,
        prompt_index=index,
        param=param,
        count=sampling.n or 1,
        max_tokens=sampling.token_limit(),
        min_tokens=sampling.min_new_tokens,
        logprobs=(body.top_logprobs_num or 0) if body.return_logprob else None,
        include_stop=bool(sampling.no_stop_trim),
        grammar=grammar,
    )


class _Answer:
    """Writes one generation in either form, or as a stream of sglang's."""

    def __init__(
        self,
        body: GenerateRequest,
        served: ServedModel,
        generation: Generation,
        specs: Sequence[ChoiceSpec],
    ) -> None:
        self._body = body
        self._served = served
        self._generation = generation
        self._specs = specs

    async def whole(self) -> BaseModel:
        completed = await self._generation.collect()
        if any(each.max_completion_tokens is not None for each in self._body.sampling()):
            return self._shortfin([done.text for done in completed])
        outputs = [
            self._output(done.index, done.text, done.tokens, done.finish) for done in completed
        ]
        if self._body.is_single() and len(outputs) == 1:
            return outputs[0]
        return GenerateResponse(outputs)

    async def chunks(self) -> AsyncGenerator[GenerateOutput, None]:
        texts = [""] * len(self._specs)
        tokens: list[list[TokenEvent]] = [[] for _ in self._specs]
        async for delta in self._generation.deltas():
            texts[delta.index] += delta.text
            tokens[delta.index] += delta.tokens
            if delta.text or delta.finish is not None:
                yield self._output(
                    delta.index, texts[delta.index], tokens[delta.index], delta.finish
                )

    def _output(
        self, index: int, text: str, tokens: Sequence[TokenEvent], finish: Finish | None
    ) -> GenerateOutput:
        usage = self._generation.usage_of(index)
        meta = MetaInfo(
            id=self._generation.engine_id(index),
            finish_reason=None if finish is None else _finish(finish, usage.completion_tokens),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
        )
        if self._body.return_logprob:
            pairs = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
            meta.output_token_logprobs = [
                self._logprob(token.token_id, found.logprob) for token, found in pairs
            ]
            if self._body.top_logprobs_num:
                meta.output_top_logprobs = [
                    [self._logprob(token_id, value) for token_id, value in found.top]
                    for _, found in pairs
                ]
        return GenerateOutput(
            index=index, text=text, output_ids=[token.token_id for token in tokens], meta_info=meta
        )

    def _logprob(self, token_id: int, value: float) -> tuple[float, int, str | None]:
        with_text = self._body.return_text_in_logprobs
        text = self._served.tokenizer.token_text(token_id) if with_text else None
        return finite(value), token_id, text

    def _shortfin(self, texts: Sequence[str]) -> ShortfinResponse:
        responses = []
        for index, prompt in enumerate(self._body.prompts()):
            shown = prompt if isinstance(prompt, str) else self._served.tokenizer.decode(prompt)
            own = [
                GeneratedText(text=text)
                for spec, text in zip(self._specs, texts, strict=True)
                if spec.prompt_index == index
            ]
            responses.append(PromptResponse(prompt=shown, responses=own))
        return ShortfinResponse(responses=responses)


def _finish(finish: Finish, completion_tokens: int) -> dict[str, Any]:
    if finish.finish_reason == "length":
        return {"type": "length", "length": completion_tokens}
    if finish.finish_reason == "stop":
        matched = finish.stop_token_id if finish.stop_reason is None else finish.stop_reason
        return {"type": "stop", "matched": matched}
    return {"type": "abort", "message": "the request was aborted"}
