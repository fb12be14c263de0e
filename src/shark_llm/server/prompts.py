"""From a request's prompt to checked token ids, and how many tokens may follow them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shark_llm.errors import RequestError
from shark_llm.server.params import SamplingFields, check_token_ids
from shark_llm.server.protocol import ChatFields
from shark_llm.server.state import ServedModel

_INLINE_CHARS = (
    2048  # some milliseconds; longer texts are tokenized on a thread, beside the streams
)
_PROBE_CHARS_PER_TOKEN = 8  # more than languages have; a text beyond that is looked at in parts
_PROBE_GROWTH = 4


async def encode_text(served: ServedModel, text: str, *, add_bos: bool, param: str) -> list[int]:
    """Ids of a raw text prompt.

    Raises:
        RequestError: the prompt is empty, far too long, or uses a token that the model has no row
            for.
    """
    if len(text) > _INLINE_CHARS:
        await asyncio.to_thread(_check_length, served, text, param=param)
    return checked_ids(served, await encode_plain(served, text, add_bos=add_bos), param=param)


async def encode_plain(served: ServedModel, text: str, *, add_bos: bool) -> list[int]:
    """Ids of any text, none of them checked against the model."""
    if len(text) > _INLINE_CHARS:
        return await asyncio.to_thread(served.tokenizer.encode, text, add_bos=add_bos)
    await asyncio.sleep(0)  # one call may bring a thousand of them
    return served.tokenizer.encode(text, add_bos=add_bos)


def _check_length(served: ServedModel, text: str, *, param: str) -> None:
    """Refuse a text whose beginning alone has more tokens than the context, before megabytes of it
    are tokenized, at seconds each.

    The parts grow, so that they cost no more than a third of the whole. A cut may part a token or
    two; a quarter more than the context is no matter of those.
    """
    context = served.max_model_len
    size = context * _PROBE_CHARS_PER_TOKEN
    while size < len(text):
        count = len(served.tokenizer.encode(text[:size], add_bos=False))
        if count > context + context // 4 + 64:
            raise _no_room(context, f"at least {count}", param=param)
        size *= _PROBE_GROWTH


async def encode_chat(
    served: ServedModel, fields: ChatFields, *, any_length: bool = False
) -> list[int]:
    """Ids of a conversation, through the model's chat template.

    `any_length`: also of one that is far too long to be answered.

    Raises:
        RequestError: there is no template, it refuses the messages, or the result is empty or far
            too long.
    """
    template = served.chat_template
    if template is None:
        raise RequestError(
            f"{served.name} has no chat template; use /v1/completions, or put a "
            "chat_template.jinja into the checkpoint and build again",
            param="messages",
            code="no_chat_template",
        )

    def render_and_encode() -> list[int]:
        text = template.render(
            [message.for_template() for message in fields.messages or ()],
            tools=fields.tools,
            documents=fields.documents,
            add_generation_prompt=fields.add_generation_prompt is not False,
            template_kwargs=fields.chat_template_kwargs,
        )
        if not any_length:
            _check_length(served, text, param="messages")
        return served.tokenizer.encode_chat(text)

    # Always on a thread: how long a template takes cannot be told from the size of the messages.
    ids = await asyncio.to_thread(render_and_encode)
    return checked_ids(served, ids, param="messages")


def checked_ids(served: ServedModel, ids: Sequence[int], *, param: str) -> list[int]:
    """Ids as the engine may have them.

    Raises:
        RequestError: there are none, or one is outside the vocabulary.
    """
    if not ids:
        raise RequestError(
            f"{param}: the prompt is empty and the tokenizer has no BOS to begin with; "
            "send at least one token",
            param=param,
            code="invalid_value",
        )
    check_token_ids(ids, param, served.vocab_size)
    return list(ids)


def token_budget(served: ServedModel, prompt_tokens: int, limit: int | None, *, param: str) -> int:
    """How many tokens may be made: the client's limit, or the rest of the context.

    Raises:
        RequestError: `context_length_exceeded`; a limit is refused, never lowered in silence.
    """
    context = served.max_model_len
    if limit == 0 and prompt_tokens <= context:
        return 0
    if prompt_tokens >= context:
        raise _no_room(context, str(prompt_tokens), param=param)
    rest = context - prompt_tokens
    if limit is None:
        return rest
    if limit > rest:
        raise RequestError(
            f"max_tokens: the context length of this model is {context} tokens, but "
            f"{prompt_tokens + limit} were asked for ({prompt_tokens} in the prompt, {limit} in "
            f"the completion); ask for at most {rest}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return limit


def _no_room(context: int, prompt_tokens: str, *, param: str) -> RequestError:
    return RequestError(
        f"{param}: the context length of this model is {context} tokens and the prompt has "
        f"{prompt_tokens}, which leaves no room to answer; shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )


def special_stops(served: ServedModel, fields: SamplingFields) -> dict[int, str]:
    """The stop strings that are special tokens of the model, by id: they never appear as text."""
    return {
        token_id: stop
        for stop in fields.stop
        if (token_id := served.tokenizer.special_id(stop)) is not None
    }
