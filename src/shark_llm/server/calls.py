"""What the calls that generate have in common, whatever form they are written in.

    body -> check -> prompt ids -> choice_specs -> run_call: submit, write the answer, close

An endpoint brings its body, and an `AnswerWriter` that knows the form of its answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from shark_llm.engine.guidance import Grammar
from shark_llm.errors import RequestError
from shark_llm.server import sse
from shark_llm.server.context import Context
from shark_llm.server.errors import error_body
from shark_llm.server.generation import Generation, GenerationFailed
from shark_llm.server.params import SamplingFields, sampling_params
from shark_llm.server.prompts import special_stops, token_budget
from shark_llm.server.state import ServedModel
from shark_llm.server.text_stream import ChoiceSpec


class AnswerWriter(Protocol):
    """Writes one generation in an endpoint's form. One of the two is called, once."""

    async def whole(self) -> BaseModel: ...

    def chunks(self) -> AsyncGenerator[BaseModel, None]: ...


def check_num_choices(num_choices: int, limit: int) -> None:
    """Bound the fan-out of one call.

    Raises:
        RequestError: 400.
    """
    if num_choices > limit:
        raise RequestError(
            f"the prompts and n (or best_of) ask for {num_choices} choices, at most {limit} fit "
            "into one call; send several",
            param="prompt",
            code="invalid_value",
        )


def choice_specs(
    served: ServedModel,
    fields: SamplingFields,
    ids: Sequence[int],
    *,
    param: str,
    count: int,
    max_tokens: int | None,
    min_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    include_stop: bool = False,
    grammar: Grammar | None = None,
    prompt_index: int = 0,
) -> list[ChoiceSpec]:
    """`count` choices for one prompt, which came in the field `param`.

    `max_tokens` None = as many as the context has room for.

    Raises:
        RequestError: the prompt leaves no room, or a parameter is out of the model's range.
    """
    budget = token_budget(served, len(ids), max_tokens, param=param)
    stop_tokens = special_stops(served, fields)
    return [
        ChoiceSpec(
            prompt_index=prompt_index,
            prompt_ids=tuple(ids),
            sampling=sampling_params(
                fields,
                max_tokens=budget,
                min_tokens=min_tokens or 0,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                defaults=served.defaults,
                vocab_size=served.vocab_size,
                extra_stop_ids=stop_tokens,
                grammar=grammar,
                choice=choice,
            ),
            stop=fields.stop,
            include_stop=include_stop or bool(fields.include_stop_str_in_output),
            stop_tokens=stop_tokens,
        )
        for choice in range(count)
    ]


async def run_call(
    context: Context,
    request: Request,
    served: ServedModel,
    specs: Sequence[ChoiceSpec],
    writer: Callable[[Generation], AnswerWriter],
    *,
    prefix: str,
    names: Sequence[str] = (),
    stream: bool,
    exclude_none: bool = False,
) -> Response:
    """Generate, and answer whole or as a stream of events. Nothing runs on after the answer.

    Raises:
        RequestError: the engine does not take the call.
        GenerationFailed: it ended with an error; a stream says so in an event instead.
        ClientDisconnect: the client left before the answer.
    """
    generation = context.begin(request, served, specs, prefix=prefix, names=names)
    streaming = False
    try:
        answer = writer(generation)
        if stream:
            events = _events(answer)
            streaming = True
            return sse.EventStream(events, on_close=generation.close)
        whole = await sse.unless_disconnected(request.receive, answer.whole())
    finally:
        if not streaming:
            generation.close()
    return Response(whole.model_dump_json(exclude_none=exclude_none), media_type="application/json")


async def _events(answer: AnswerWriter) -> AsyncGenerator[bytes, None]:
    """The chunks as events, and the one end that a stream has: [DONE], or the error."""
    chunks = answer.chunks()
    try:
        async for chunk in chunks:
            yield sse.event(chunk)
    except GenerationFailed as error:
        yield sse.event(error_body(str(error), status=error.status, code=error.code))
        return
    finally:
        await chunks.aclose()
    yield sse.DONE
