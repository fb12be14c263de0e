"""The sampling parameters of all generating endpoints: taken or refused, and what they mean.

Field names and ranges are those of the OpenAI API and of vLLM's additions to it. JSON types are
strict: true is not 1, "2" is not 2. Unknown fields pass. Known fields that this server does not
implement are in `UNSUPPORTED`: their neutral values pass, any other is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from shark_llm.engine.guidance import Grammar
from shark_llm.engine.request import SamplingParams
from shark_llm.errors import RequestError
from shark_llm.server.errors import shorten

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_LOGPROBS = 20
_SEED_MASK = (1 << 64) - 1

# name -> the values that ask for nothing
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "prompt_logprobs": (0, False),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "guided_grammar": (),
    "guided_json_object": (False,),
    "guided_whitespace_pattern": (),
    "guided_decoding_backend": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    "lora_path": (),
    "lora_request": (),
    "kv_transfer_params": (),
    "thinking_token_budget": (),
}


def check_unsupported(extra: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse the known fields that ask for something this server does not do.

    Raises:
        RequestError: 400 `unsupported_parameter`, naming the field.
    """
    for name, value in extra.items():
        if name not in table or value is None:
            continue
        if any(value == neutral and type(value) is type(neutral) for neutral in table[name]):
            continue
        raise RequestError(
            f"{name}: not supported by this server, got {shorten(value)}; leave the field out",
            param=name,
            code="unsupported_parameter",
        )


def _stop_list(value: object) -> object:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"must be a string or a list of strings, got {shorten(value)}")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stops)}")
    for stop in stops:
        if not stop:
            raise ValueError("a stop string may not be empty; leave it out")
        if len(stop) > MAX_STOP_CHARS:
            raise ValueError(f"a stop string may have {MAX_STOP_CHARS} characters, got {len(stop)}")
    return tuple(stops)


def _logit_bias(value: object) -> object:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"must be an object of token id to bias, got {shorten(value)}")
    biases = {}
    for key, bias in value.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise ValueError(f"keys are token ids, got {shorten(key)}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {key} must be in -100..100, got {shorten(bias)}")
        biases[int(key)] = float(bias)
    return biases


StopStrings = Annotated[
    tuple[str, ...],
    BeforeValidator(_stop_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}},
                {"type": "null"},
            ],
            "maxItems": MAX_STOP_STRINGS,
        }
    ),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                {"type": "null"},
            ]
        }
    ),
]


class Strict(BaseModel):
    """Base of all request bodies: strict JSON types, unknown fields kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class SamplingFields(Strict):
    """What all generating endpoints have in common. null = the default."""

    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**64 - 1)
    stop: StopStrings = ()
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10, allow_inf_nan=False)
    logit_bias: LogitBias = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What a request gets that does not say: the model's generation_config.json, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def defaults_from_generation_config(
    config: Mapping[str, Any],
) -> tuple[SamplingDefaults, list[str]]:
    """The sampling defaults that a model's authors recommend, and a note on each value not taken.

    Keys: temperature, top_p, top_k (0 = off), min_p, repetition_penalty. As in vLLM, `do_sample` is
    not read: it is about `generate()`, not about a server.
    """
    taken: dict[str, Any] = {}
    notes: list[str] = []
    ranges = {
        "temperature": (0.0, 2.0),
        "top_p": (0.0, 1.0),
        "top_k": (-1, math.inf),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.01, 10.0),
    }
    for name, (low, high) in ranges.items():
        value = config.get(name)
        if value is None:
            continue
        kinds = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            notes.append(
                f"generation_config.json: {name} is {shorten(value)}, not taken as a default; "
                f"expected {low:g}..{high:g}"
            )
        elif name == "top_k":
            taken[name] = value if value > 0 else None
        else:
            taken[name] = float(value)
    return SamplingDefaults(**taken), notes


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int,
    min_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    defaults: SamplingDefaults,
    vocab_size: int,
    extra_stop_ids: Collection[int] = (),
    grammar: Grammar | None = None,
    choice: int = 0,
) -> SamplingParams:
    """What the engine is told for choice number `choice` of one prompt.

    A seed is moved on by `choice`, so that n choices differ and each can be asked for again.

    Raises:
        RequestError: a token id beyond the vocabulary, or min_tokens above max_tokens.
    """
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {min_tokens}, more than the {max_tokens} tokens that may be made; "
            "lower it or raise max_tokens",
            param="min_tokens",
            code="invalid_value",
        )
    check_token_ids(fields.stop_token_ids or (), "stop_token_ids", vocab_size)
    check_token_ids(fields.logit_bias, "logit_bias", vocab_size)
    top_p = defaults.top_p if fields.top_p is None else fields.top_p
    top_k = defaults.top_k if fields.top_k is None else fields.top_k
    if top_k is not None and top_k <= 0:
        top_k = None
    if top_p == 0:  # a nucleus of probability 0 is the best token alone
        top_p, top_k = 1.0, 1

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=given(fields.temperature, defaults.temperature),
        top_k=top_k,
        top_p=top_p,
        min_p=given(fields.min_p, defaults.min_p),
        seed=None if fields.seed is None else (fields.seed + choice) & _SEED_MASK,
        presence_penalty=given(fields.presence_penalty, 0.0),
        frequency_penalty=given(fields.frequency_penalty, 0.0),
        repetition_penalty=given(fields.repetition_penalty, defaults.repetition_penalty),
        logit_bias=fields.logit_bias,
        stop_token_ids=frozenset(fields.stop_token_ids or ()) | frozenset(extra_stop_ids),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def check_token_ids(ids: Any, param: str, vocab_size: int) -> None:
    """Refuse ids outside 0 .. vocab_size - 1, which would crash a step for everybody."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param}: token id {shorten(token_id)} is outside the vocabulary "
                f"0..{vocab_size - 1}",
                param=param,
                code="invalid_token_id",
            )
