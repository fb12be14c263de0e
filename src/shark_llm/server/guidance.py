"""Structured output as clients ask for it: many names, one grammar.

OpenAI        response_format {"type": "json_object"} or {"type": "json_schema", ...}
vLLM          guided_json, guided_regex, guided_choice, or the same inside structured_outputs
sglang        json_schema, regex in the sampling_params of /generate
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import from_json

from shark_llm.engine.guidance import Grammar, GrammarCompiler, GrammarSource
from shark_llm.errors import RequestError
from shark_llm.server.errors import shorten
from shark_llm.server.params import Strict, check_unsupported

MAX_CHOICES = 4096
_ANY_OBJECT = '{"type":"object"}'
_STRUCTURED_OUTPUTS_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "grammar": (),
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_fallback": (False,),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}


def _schema(value: object) -> object:
    """A JSON schema, as an object or as its text, in its shortest form."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = from_json(value)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON schema, an object or its text, got {shorten(value)}")
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _choices(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"must be a list of strings, got {shorten(value)}")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise ValueError(f"must have 1 to {MAX_CHOICES} strings, got {len(value)}")
    return json.dumps(value, ensure_ascii=False)


SchemaText = Annotated[
    str | None,
    BeforeValidator(_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}),
]
ChoicesText = Annotated[
    str | None,
    BeforeValidator(_choices),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "array",
                    "items": {"type": "string"},
                    "minItems": 1,
                    "maxItems": MAX_CHOICES,
                },
                {"type": "null"},
            ]
        }
    ),
]


class NamedSchema(Strict):
    """`response_format.json_schema`. The schema is always kept to, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: SchemaText = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: str
    json_schema: NamedSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's newer form: one of these."""

    json_: SchemaText = Field(default=None, alias="json")
    regex: str | None = None
    choice: ChoicesText = None
    json_object: bool | None = None


class GuidedFields(Strict):
    """The fields of both OpenAI endpoints; at most one of them may ask for something."""

    response_format: ResponseFormat | None = None
    guided_json: SchemaText = None
    guided_regex: str | None = None
    guided_choice: ChoicesText = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _one_grammar(self) -> GuidedFields:
        params = [source.param for source in self._sources()]
        if len(params) > 1:
            raise ValueError(f"{params[0]}: cannot be combined with {params[1]}; send one of them")
        return self

    def grammar_source(self) -> GrammarSource | None:
        """What the text must match, or None.

        Raises:
            RequestError: 400 `unsupported_parameter`.
        """
        if self.structured_outputs is not None:
            extra = self.structured_outputs.model_extra or {}
            check_unsupported(extra, _STRUCTURED_OUTPUTS_UNSUPPORTED)
        sources = self._sources()
        return sources[0] if sources else None

    def _sources(self) -> Sequence[GrammarSource]:
        found = [
            _format_source(self.response_format),
            _source("json_schema", self.guided_json, "guided_json"),
            _source("regex", self.guided_regex, "guided_regex"),
            _source("choice", self.guided_choice, "guided_choice"),
        ]
        if self.structured_outputs is not None:
            name, asked = "structured_outputs", self.structured_outputs
            found += [
                _source("json_schema", asked.json_, name),
                _source("regex", asked.regex, name),
                _source("choice", asked.choice, name),
                _source("json_schema", _ANY_OBJECT if asked.json_object else None, name),
            ]
        return [source for source in found if source is not None]


async def compile_grammar(
    compiler: GrammarCompiler | None, source: GrammarSource | None
) -> Grammar | None:
    """The grammar that a request asked for, compiled beside everything else.

    Raises:
        RequestError: 400 `invalid_grammar` with the library's reason, or
            `unsupported_parameter` where the model's tokenizer has none.
    """
    if source is None:
        return None
    if compiler is None:
        raise RequestError(
            f"{source.param}: this model's tokenizer cannot be used for structured output; "
            "leave the field out",
            param=source.param,
            code="unsupported_parameter",
        )
    return await asyncio.wrap_future(compiler.compile(source))


def _source(kind: Any, text: str | None, param: str) -> GrammarSource | None:
    return None if text is None else GrammarSource(kind=kind, text=text, param=param)


def _format_source(format_: ResponseFormat | None) -> GrammarSource | None:
    if format_ is None or format_.type == "text":
        return None
    if format_.type == "json_object":
        return _source("json_schema", _ANY_OBJECT, "response_format")
    if format_.type != "json_schema":
        raise ValueError(
            f"response_format: the type {shorten(format_.type)} is not supported; it must be "
            "'text', 'json_object' or 'json_schema'"
        )
    schema = format_.json_schema
    if schema is None or schema.schema_ is None:
        raise ValueError("response_format: type 'json_schema' needs json_schema.schema")
    return _source("json_schema", schema.schema_, "response_format")
