"""/generate in the forms of sglang and shortfin, /abort, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serve_harness import EOS, FakeServer, fake_server


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server({"alphabet:": "ABCDEFGHIJ", "dots:": "so..."}) as running:
        yield running
        running.wait_idle()


def generate(server: FakeServer, **body: Any) -> Any:
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_one_text_gets_one_object(server: FakeServer) -> None:
    answer = generate(server, text="alphabet:", sampling_params={"temperature": 0})
    assert answer["text"] == "ABCDEFGHIJ"
    assert len(answer["output_ids"]) == 10
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (10, 11)


def test_lists_get_lists_and_may_have_their_own_parameters(server: FakeServer) -> None:
    first, second = generate(
        server,
        text=["alphabet:", "dots:"],
        sampling_params=[{"max_new_tokens": 2, "temperature": 0}, {"stop": ".", "temperature": 0}],
    )
    assert first["text"] == "AB"
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert second["text"] == "so"
    assert second["meta_info"]["finish_reason"] == {"type": "stop", "matched": "."}


def test_input_ids_one_or_several(server: FakeServer) -> None:
    ids = server.tokenizer.encode("dots:")
    assert generate(server, input_ids=ids)["text"] == "so..."
    assert [answer["text"] for answer in generate(server, input_ids=[ids, ids])] == ["so..."] * 2


def test_shortfins_names_get_shortfins_form(server: FakeServer) -> None:
    ids = server.tokenizer.encode("alphabet:")
    answer = generate(server, input_ids=ids, sampling_params={"max_completion_tokens": 3})
    assert answer == {"responses": [{"prompt": "alphabet:", "responses": [{"text": "ABC"}]}]}


def test_a_stream_repeats_the_text_from_its_beginning(server: FakeServer) -> None:
    body = {"text": "alphabet:", "sampling_params": {"temperature": 0}}
    events = server.stream("/generate", body)
    texts = [event["text"] for event in events]
    assert all("ABCDEFGHIJ".startswith(text) for text in texts)
    assert texts[-1] == "ABCDEFGHIJ"
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert events[-1]["meta_info"]["completion_tokens"] == 11


def test_logprobs_of_the_output(server: FakeServer) -> None:
    answer = generate(
        server,
        text="dots:",
        return_logprob=True,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [text for _, _, text in entries] == ["s", "o", "..."]
    assert [len(top) for top in answer["meta_info"]["output_top_logprobs"]] == [2, 2, 2]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": 5}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [300]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": 3}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"num_beams": 4}}, "num_beams"),
        ({"text": "a", "sampling_params": {"ebnf": "{}"}}, "ebnf"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 1, "max_tokens": 1}}, ""),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "return_input_ids": True}, "return_input_ids"),
    ],
)
def test_what_is_refused(server: FakeServer, body: dict[str, Any], param: str) -> None:
    response = server.post("/generate", body)
    assert response.status_code == 400
    assert (response.json()["error"]["param"] or "").startswith(param)


def test_abort_of_nothing_is_no_error(server: FakeServer) -> None:
    assert server.post("/abort", {"rid": "no such"}).json() == {"aborted": 0}
    assert server.post("/abort", {}).status_code == 400
    assert server.post("/abort", {"rid": "a", "request_id": "b"}).status_code == 400


def test_tokenize_and_back(server: FakeServer) -> None:
    answer = server.post(
        "/tokenize", {"prompt": "é world", "return_token_strs": True, "model": None}
    ).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert answer["token_strs"][0] == "<s>"
    text = server.post("/detokenize", {"tokens": answer["tokens"]}).json()
    assert text == {"prompt": "<s>é world"}
    bare = server.post("/tokenize", {"prompt": "é", "add_special_tokens": False}).json()
    assert bare["count"] == 2


def test_tokenize_takes_a_conversation(server: FakeServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    closed = {"messages": messages, "add_generation_prompt": False}
    assert len(server.post("/tokenize", closed).json()["tokens"]) < len(tokens)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": "x"}),
    ],
)
def test_wrong_tokenization_requests(server: FakeServer, path: str, body: Any) -> None:
    assert server.post(path, body).status_code == 400


def test_rows_without_a_token_have_no_text(server: FakeServer) -> None:
    """A20: ids between the tokenizer's size and the matrix's do not break the detokenizer."""
    assert server.post("/detokenize", {"tokens": [299, 36]}).json() == {"prompt": "A"}
