"""Chat templates, rendered the way transformers renders them, in a jinja2 sandbox.

The environment mirrors `transformers.utils.chat_template_utils`: trim_blocks, lstrip_blocks, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, and the
`{% generation %}` tag (which only marks text and renders its body).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shark_llm.errors import ArtifactError, RequestError
from shark_llm.server.errors import shorten

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks text for training, and renders it here."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template together with the special tokens that it may print."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`.

        Raises:
            ArtifactError: the template is not valid jinja2.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ArtifactError(
                f"the chat template does not compile: {error}; fix chat_template.jinja"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Raises:
            RequestError: the template refuses these messages, or fails on them.
        """
        extra = dict(template_kwargs or {})
        taken = sorted(RESERVED & extra.keys())
        if taken:
            raise RequestError(
                f"chat_template_kwargs may not set {', '.join(taken)}; "
                "send it as a field of the request",
                param="chat_template_kwargs",
                code="invalid_value",
            )
        variables = {
            **self._special_tokens,
            **extra,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except RecursionError:
            reason = "it recursed too deeply"
        except (TemplateError, ArithmeticError, AttributeError, LookupError) as error:
            reason = str(error)
        except (TypeError, ValueError) as error:
            # A template that adds None to a string: the messages are not what it was written for.
            reason = str(error)
        raise RequestError(
            f"the chat template cannot render these messages: {shorten(reason, 200)}",
            param="messages",
            code="chat_template_error",
        )


def load_chat_template(
    jinja_file: str | None, tokenizer_config: Mapping[str, Any]
) -> ChatTemplate | None:
    """The model's template: chat_template.jinja, else `chat_template` of tokenizer_config.json.

    Of several named templates "default" is taken. None: the model has none (a base model).

    Raises:
        ArtifactError: there is a template, and it is not valid.
    """
    source: Any = jinja_file if jinja_file is not None else tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ArtifactError(
            f"tokenizer_config.json: chat_template is a {type(source).__name__}, "
            "expected a string or a list of named templates"
        )
    return ChatTemplate(source, special_tokens(tokenizer_config))


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token ... as strings; a token may be written as a string or as an object."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
        value = tokenizer_config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
