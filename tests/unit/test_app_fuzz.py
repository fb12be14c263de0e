"""Whatever JSON is sent to an endpoint, the answer is below 500 and the engine keeps nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_harness import FakeServer, fake_server
from shark_llm.server.params import UNSUPPORTED
from shark_llm.server.protocol import (
    CHAT_UNSUPPORTED,
    ChatCompletionRequest,
    CompletionRequest,
)

SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 5, 0.5, -0.5, 1.5, 1e300, 10**9, -(10**9), 2**70, "", "x", "\0",
    "é😀", "user", "text", "<s>", "<|im_end|>", "1", "fake/llama",
]  # fmt: skip
values = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "299", "-1", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", ""]), "content": values}
    ),
    max_size=3,
)
prompts = st.sampled_from(["", "ok", ["ok", "no"], [1, 2], [[1], [2, 3]], [[]], [300], ["ok", 1]])


def bodies(names: list[str], **own: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with its prompt mostly right, and up to four other fields of any value."""
    others = st.dictionaries(st.sampled_from(names), values, max_size=4)
    return st.builds(lambda base, extra: {**extra, **base}, st.fixed_dictionaries(own), others)


SAMPLING = [*sorted(set(CompletionRequest.model_fields) - {"prompt"}), "zzz", *UNSUPPORTED]
CHAT = [*sorted(set(ChatCompletionRequest.model_fields) - {"messages"}), "zzz", *CHAT_UNSUPPORTED]
ENDPOINTS: dict[str, st.SearchStrategy[Any]] = {
    "/v1/completions": bodies(SAMPLING, prompt=prompts | values),
    "/v1/chat/completions": bodies(CHAT, messages=messages | values),
    "/generate": bodies(
        ["rid", "stream", "return_logprob", "top_logprobs_num", "image_data"],
        text=prompts | values,
        sampling_params=bodies([*SAMPLING, "max_new_tokens", "num_beams", "no_stop_trim"]) | values,
    ),
    "/tokenize": bodies(["model", "messages", "tools", "add_special_tokens"], prompt=values),
    "/detokenize": bodies(["model"], tokens=prompts | values),
    "/abort": bodies(["rid", "request_id"]),
}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server({"ok": "fine é"}, max_model_len=48, num_pages=400) as running:
        yield running
        running.wait_idle()


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_body_is_a_5xx(server: FakeServer, path: str, data: st.DataObject) -> None:
    """D16, D18, D20, D21, D22, D25."""
    body = data.draw(ENDPOINTS[path] | values)
    response = server.post(path, body)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) < 1000
    elif response.headers["content-type"] == "application/json":
        json.loads(response.content, parse_constant=lambda name: pytest.fail(name))
