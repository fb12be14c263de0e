"""The request bodies of the OpenAI-style endpoints, as data. Strict: see `params`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import from_json

from shark_llm.server.errors import shorten
from shark_llm.server.guidance import GuidedFields
from shark_llm.server.params import (
    MAX_LOGPROBS,
    MAX_N,
    UNSUPPORTED,
    SamplingFields,
    Strict,
)

CHAT_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "echo": (False,),
    "chat_template": (),
    "continue_final_message": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "mm_processor_kwargs": ({},),
    "store": (False,),
}

_INTEGER_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _prompt(value: object) -> object:
    """A prompt in any of OpenAI's four forms, as a tuple of prompts: strings, or tuples of ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError(
            "must be a string, a list of strings, a list of token ids or a list of lists of "
            f"token ids, got {shorten(value)}"
        )
    if not value:
        raise ValueError("is an empty list; send at least one prompt")
    if _is_id_list(value):
        return (tuple(value),)
    prompts: list[str | tuple[int, ...]] = []
    for position, item in enumerate(value):
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and _is_id_list(item):
            prompts.append(tuple(item))
        else:
            raise ValueError(
                f"item {position} is neither a string nor a list of token ids: {shorten(item)}"
            )
    if len({type(prompt) for prompt in prompts}) > 1:
        raise ValueError("mixes strings and token ids; send two requests")
    return tuple(prompts)


def _is_id_list(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


Prompts = Annotated[
    tuple[str | tuple[int, ...], ...],
    BeforeValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _INTEGER_LIST,
                {"type": "array", "items": _INTEGER_LIST, "minItems": 1},
            ]
        }
    ),
]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @model_validator(mode="after")
    def _usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats: only allowed when include_usage is true")
        return self


class GenerationRequest(SamplingFields, GuidedFields):
    """What both OpenAI endpoints take beyond sampling."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int | None = Field(default=None, ge=0)
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)
    user: str | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=128)
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _combinations(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError(
                f"max_tokens is {both[0]} and max_completion_tokens is {both[1]}; send one of them"
            )
        return self

    def token_limit(self) -> int | None:
        """The most tokens wanted, or None for the rest of the context."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    def choices_per_prompt(self) -> int:
        return self.n or 1

    def names(self) -> tuple[str, ...]:
        """What the client calls this request, for /abort."""
        return () if self.request_id is None else (self.request_id,)

    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def wants_usage_always(self) -> bool:
        """Every chunk of a stream tells the counts of its choice so far, as vLLM has it."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _best_of_combinations(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.choices_per_prompt():
            raise ValueError(
                f"best_of: is {self.best_of}, less than n = {self.choices_per_prompt()}; "
                "raise it or lower n"
            )
        if self.chooses_best() and self.stream:
            raise ValueError(
                f"best_of: is {self.best_of} and n is {self.choices_per_prompt()}, but what is "
                "best is known only at the end; leave out stream or best_of"
            )
        return self

    def candidates_per_prompt(self) -> int:
        """How many choices are generated; the best `n` of them are returned."""
        return self.best_of or self.choices_per_prompt()

    def chooses_best(self) -> bool:
        return self.candidates_per_prompt() > self.choices_per_prompt()


def _content(value: object) -> object:
    """Message content as one string; text parts are joined by newlines, as vLLM joins them."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of parts, got {shorten(value)}")
    texts = []
    for position, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"part {position} must be {{'type': 'text', 'text': '...'}}, "
                f"this server takes text only, got {shorten(part)}"
            )
        texts.append(part["text"])
    return "\n".join(texts)


Content = Annotated[
    str | None,
    BeforeValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]


class ChatMessage(Strict):
    """One message. Fields beyond role and content (name ...) reach the template as sent."""

    role: str = Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")
    content: Content = None
    tool_calls: list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content a string, tool arguments an object."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        message.update(self.model_extra or {})
        if self.tool_calls:
            message["tool_calls"] = [_with_parsed_arguments(call) for call in self.tool_calls]
        return message


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        # Not json.loads: it would let lone surrogates in, which no tokenizer takes.
        arguments = from_json(function["arguments"])
    except ValueError:  # a model's broken JSON, sent back in the history: shown as it was
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class ChatFields(Strict):
    """What a chat prompt is made from; /tokenize takes it too."""

    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(GenerationRequest, ChatFields):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _chat_combinations(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        return self
