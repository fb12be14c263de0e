"""The request models: what is taken, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from shark_llm.errors import RequestError
from shark_llm.server.errors import from_validation_error, shorten
from shark_llm.server.params import (
    SamplingDefaults,
    check_unsupported,
    defaults_from_generation_config,
    sampling_params,
)
from shark_llm.server.protocol import (
    CHAT_UNSUPPORTED,
    ChatCompletionRequest,
    CompletionRequest,
)


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"prompt": "x", **fields}))


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return ChatCompletionRequest.model_validate_json(json.dumps(body))


def refusal(make: Any, **fields: Any) -> RequestError:
    with pytest.raises(ValidationError) as caught:
        make(**fields)
    return from_validation_error(caught.value)


def sampling(body: CompletionRequest, **kwargs: Any) -> Any:
    options = {
        "max_tokens": 8,
        "min_tokens": 0,
        "logprobs": None,
        "defaults": SamplingDefaults(),
        "vocab_size": 300,
    }
    return sampling_params(body, **(options | kwargs))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 1e999),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("min_p", 1.5),
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", "2"),
        ("seed", 2**64),
        ("seed", 1.0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop", ["x"] * 65),
        ("stop", "x" * 4097),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", 1),
        ("include_stop_str_in_output", 1),
        ("ignore_eos", "yes"),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": True}),
        ("logit_bias", [1]),
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", "yes"),
        ("stream", 1),
        ("stream_options", True),
        ("prompt", 5),
        ("prompt", []),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", ["a", [1]]),
        ("prompt", [[1], "a"]),
        ("prompt", [["a"]]),
        ("prompt", None),
        ("model", 5),
        ("best_of", 0),
    ],
)
def test_a_wrong_value_is_refused_and_named(field: str, value: Any) -> None:
    """D16, D18, D20, D21, D22, D06: the message and `param` name the field."""
    error = refusal(completion, **{field: value})
    assert error.status == 400
    assert error.param is not None
    assert error.param.split("[")[0] == field
    assert str(error).startswith(f"{error.param}: ")
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("temperature", 1e-12),
        ("top_p", 0),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 10**7),
        ("n", 128),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("stop", "x"),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", []),
        ("stop", None),
        ("logit_bias", {"5": -100}),
        ("logit_bias", None),
        ("max_tokens", 0),
        ("prompt", "x"),
        ("prompt", [""]),
        ("prompt", [1, 2]),
        ("prompt", [[1, 2], [3]]),
        ("no_such_field", {"a": [1]}),
        ("user", "me"),
        ("stream_options", None),
    ],
)
def test_a_right_value_is_taken(field: str, value: Any) -> None:
    completion(**{field: value})


def test_unknown_fields_pass_and_are_kept_apart() -> None:
    assert completion(no_such_field=1).model_extra == {"no_such_field": 1}


@pytest.mark.parametrize("field", ["temperature", "top_p", "n", "seed", "stop", "max_tokens"])
def test_null_is_the_default(field: str) -> None:
    assert getattr(completion(**{field: None}), field) in (None, ())


def test_prompts_come_in_four_forms() -> None:
    """D22: a list of lists is two prompts."""
    assert completion(prompt="a").prompt == ("a",)
    assert completion(prompt=["a", "b"]).prompt == ("a", "b")
    assert completion(prompt=[1, 2]).prompt == ((1, 2),)
    assert completion(prompt=[[1, 2], [3]]).prompt == ((1, 2), (3,))


def test_only_the_first_faults_are_told_and_inputs_are_cut() -> None:
    error = refusal(completion, temperature=9, top_p=9, top_k=-9, n=0, seed="x" * 10_000, min_p=9)
    assert str(error).count(";") == 3
    assert str(error).endswith("and 3 more")
    assert len(str(refusal(completion, seed="x" * 10_000))) < 200


def test_a_rule_over_two_fields_names_one() -> None:
    error = refusal(completion, stream_options={"include_usage": True})
    assert error.param == "stream_options"
    error = refusal(completion, max_tokens=1, max_completion_tokens=2)
    assert "max_tokens is 1 and max_completion_tokens is 2" in str(error)
    error = refusal(chat, top_logprobs=2)
    assert error.param == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "<|im_end|>", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"tools": "x"}, "tools"),
    ],
)
def test_a_wrong_chat_is_refused_and_named(fields: dict[str, Any], param: str) -> None:
    """D10, D23: chat with max_tokens 0 or without messages is a 400."""
    assert refusal(chat, **fields).param == param


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "user", "content": parts, "name": "me"}])
    assert body.messages[0].for_template() == {"role": "user", "content": "a\nb", "name": "me"}


def test_tool_arguments_reach_the_template_as_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    broken = {"type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, broken]}
    shown = chat(messages=[message]).messages[0].for_template()
    assert shown["content"] == ""
    assert shown["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert shown["tool_calls"][1] == broken


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("guided_grammar", "root ::= a"),
        ("guided_whitespace_pattern", " "),
        ("prompt_logprobs", 1),
        ("use_beam_search", True),
        ("skip_special_tokens", False),
        ("truncate_prompt_tokens", 5),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("parallel_tool_calls", False),
        ("reasoning_effort", "high"),
        ("echo", True),
        ("modalities", ["audio"]),
        ("use_beam_search", 0),  # not the neutral false: strict here too
    ],
)
def test_known_but_unsupported_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_unsupported({field: value}, CHAT_UNSUPPORTED)
    assert caught.value.param == field
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", None),
        ("suffix", ""),
        ("use_beam_search", False),
        ("skip_special_tokens", True),
        ("parallel_tool_calls", True),
        ("modalities", ["text"]),
        ("something_new", object()),
    ],
)
def test_neutral_values_pass(field: str, value: Any) -> None:
    check_unsupported({field: value}, CHAT_UNSUPPORTED)


def test_top_k_and_top_p_are_translated() -> None:
    """D20: -1 and 0 are off; top_p 0 is the best token alone."""
    assert sampling(completion(top_k=-1)).top_k is None
    assert sampling(completion(top_k=0)).top_k is None
    assert sampling(completion(top_k=7)).top_k == 7
    zero = sampling(completion(top_p=0))
    assert (zero.top_p, zero.top_k) == (1.0, 1)


def test_each_choice_has_its_own_seed() -> None:
    body = completion(seed=-1)
    assert [sampling(body, choice=choice).seed for choice in (0, 1)] == [2**64 - 1, 0]
    assert sampling(completion()).seed is None


@pytest.mark.parametrize("fields", [{"stop_token_ids": [300]}, {"stop_token_ids": [-1]}])
def test_stop_ids_outside_the_vocabulary_are_refused(fields: dict[str, Any]) -> None:
    """D21."""
    with pytest.raises(RequestError, match=r"stop_token_ids: token id .* 0\.\.299"):
        sampling(completion(**fields))


def test_bias_outside_the_vocabulary_is_refused() -> None:
    """D21."""
    with pytest.raises(RequestError, match="logit_bias: token id 999999"):
        sampling(completion(logit_bias={"999999": 1}))


def test_min_tokens_above_the_budget_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 9, more than the 8"):
        sampling(completion(), min_tokens=9)


def test_defaults_come_from_the_model_and_yield_to_the_request() -> None:
    """D20: top_k 0 in generation_config.json is off."""
    defaults, notes = defaults_from_generation_config(
        {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "do_sample": True, "eos_token_id": [1]}
    )
    assert notes == []
    taken = sampling(completion(top_p=0.5), defaults=defaults)
    assert (taken.temperature, taken.top_p, taken.top_k) == (0.6, 0.5, None)


@pytest.mark.parametrize("value", ["hot", True, 9.0, [1]])
def test_a_strange_default_is_put_aside_and_told(value: Any) -> None:
    defaults, notes = defaults_from_generation_config({"temperature": value})
    assert defaults == SamplingDefaults()
    assert len(notes) == 1
    assert "temperature" in notes[0]


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, list(range(10**6)), {str(i): i for i in range(10**5)}, 10**5000],
    ids=["text", "list", "object", "integer"],
)
def test_values_are_shown_short(value: Any) -> None:
    assert len(shorten(value)) <= 70
