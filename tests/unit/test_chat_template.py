"""Chat templates render as in transformers, and cannot do harm."""

from __future__ import annotations

from typing import Any

import pytest

from shark_llm.errors import ArtifactError, RequestError
from shark_llm.server.chat_template import ChatTemplate, load_chat_template, special_tokens

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = USER, **kwargs: Any) -> str:
    return ChatTemplate(source, TOKENS).render(messages, **kwargs)


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.first %}\n[{{ m.role }}]{% endif %}\n"
    "{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}\n",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
    "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "{{ {'a': '<b>&\"é\"', 'n': None} | tojson(indent=2) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ tools | tojson if tools else 'none' }}{{ strftime_now('%Y') | length }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_text_is_that_of_transformers(source: str) -> None:
    """The oracle is transformers' own renderer, on the same template and messages."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "system", "content": " Be <kind> & brief "},
        {"role": "user", "content": "Hé\n"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "<x>"}}]
    expected, _ = render_jinja_template(
        conversations=[messages],
        chat_template=source,
        tools=tools,
        add_generation_prompt=True,
        **TOKENS,
    )
    assert render(source, messages, tools=tools) == expected[0]


def test_raise_exception_is_a_400_with_its_text() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.status == 400
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content.x }}",
        "{{ 'a' + none }}",
        "{{ messages[0].content | int / 0 }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_a_template_that_fails_is_a_400(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.code == "chat_template_error"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        text = render(source)
    except RequestError:
        return
    assert "class" not in text
    assert "globals" not in text


def test_template_kwargs_reach_the_template_but_cannot_replace_the_messages() -> None:
    assert render("{{ x }}", template_kwargs={"x": 5}) == "5"
    with pytest.raises(RequestError, match="may not set messages, tools") as caught:
        render("", template_kwargs={"tools": [], "messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_a_broken_template_is_refused_at_load() -> None:
    with pytest.raises(ArtifactError, match="does not compile"):
        ChatTemplate("{% for %}", TOKENS)


def test_where_the_template_comes_from() -> None:
    config = {"chat_template": "config", **TOKENS}
    named = {
        "chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    }

    def text(template: ChatTemplate | None) -> str:
        assert template is not None
        return template.render(USER)

    assert text(load_chat_template("file", config)) == "file"
    assert text(load_chat_template(None, config)) == "config"
    assert text(load_chat_template(None, named)) == "d"
    assert load_chat_template(None, {}) is None
    with pytest.raises(ArtifactError, match="chat_template is a int"):
        load_chat_template(None, {"chat_template": 5})


def test_special_tokens_as_text_or_object() -> None:
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": None,
    }
    assert special_tokens(config) == TOKENS
