"""/v1/completions over a scripted engine: text, counts, stops, logprobs, streaming."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from serve_harness import EOS, FakeServer, byte_tokenizer, chat_prompt, fake_server
from shark_llm.server.params import SamplingDefaults
from shark_llm.server.tokenizer import PromptTokenizer

LETTERS = "é 삼겹살 👩‍👩‍👧 ok"
CUT = [*byte_tokenizer().encode("é", add_special_tokens=False).ids][:1]
SCRIPT: dict[str, Any] = {
    "letters:": LETTERS,
    "cut:": CUT,
    "alphabet:": "ABCDEFGHIJ",
    "dots:": "so...",
    "spaces:": " a  b",
    "special:": [70, 3, 71],
    "fourteen:": "one two three ",
}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(SCRIPT) as running:
        yield running
        running.wait_idle()


def both_ways(
    server: FakeServer, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same request whole and streamed."""
    response = server.post(path, {"temperature": 0, **body})
    assert response.status_code == 200, response.text
    options = {"stream_options": {"include_usage": True}}
    return response.json(), server.stream(path, {**body, **options})


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


@pytest.mark.parametrize(
    ("body", "text", "reason", "tokens"),
    [
        ({"prompt": "letters:"}, LETTERS, "stop", len(LETTERS.encode()) + 1),
        ({"prompt": "letters:", "max_tokens": 1}, "\ufffd", "length", 1),  # D01: cut in a letter
        ({"prompt": "cut:"}, "\ufffd", "stop", 2),
        ({"prompt": "spaces:"}, " a  b", "stop", 6),
        ({"prompt": "alphabet:", "stop": "DEFGHIJ"}, "ABC", "stop", 10),  # D04
        ({"prompt": "alphabet:", "stop": ["H", "EF", "Z"]}, "ABCD", "stop", 6),  # D06: earliest
        ({"prompt": "dots:", "stop": ".."}, "so", "stop", 3),  # D06: ends inside a token
        ({"prompt": "dots:", "stop": "..", "max_tokens": 2}, "so", "length", 2),
        (
            {"prompt": "alphabet:", "stop": "DEFGHIJ", "include_stop_str_in_output": True},  # D07
            "ABCDEFGHIJ",
            "stop",
            10,
        ),
        (
            {"prompt": "dots:", "stop": "..", "include_stop_str_in_output": True},
            "so..",
            "stop",
            3,
        ),
        ({"prompt": "alphabet:", "stop": "CDX"}, "ABCDEFGHIJ", "stop", 11),  # held back, released
        ({"prompt": "alphabet:", "stop": "IJK", "max_tokens": 10}, "ABCDEFGHIJ", "length", 10),
        ({"prompt": "alphabet:", "stop": "C", "min_tokens": 5}, "ABCDEFGHIJ", "stop", 11),
        ({"prompt": "alphabet:", "stop_token_ids": [41]}, "ABCDE", "stop", 6),
        ({"prompt": "alphabet:", "max_tokens": 4}, "ABCD", "length", 4),
        ({"prompt": "alphabet:", "max_tokens": 0, "echo": True}, "alphabet:", "length", 0),
        ({"prompt": "alphabet:", "max_tokens": 0}, "", "length", 0),
        ({"prompt": "alphabet:", "max_tokens": 2, "echo": True}, "alphabet:AB", "length", 2),
    ],
)
def test_text_reason_and_counts_whole_and_streamed(
    server: FakeServer, body: dict[str, Any], text: str, reason: str, tokens: int
) -> None:
    """D01, D04, D06, D07, D13, D14: both ways agree in text, reason and usage."""
    whole, events = both_ways(server, "/v1/completions", body)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    assert whole["usage"]["completion_tokens"] == tokens
    assert text_of(events) == text
    assert [c["finish_reason"] for e in events for c in e["choices"]][-1] == reason
    usage = [event["usage"] for event in events]
    assert usage[:-1] == [None] * (len(events) - 1)
    assert {**usage[-1], "prompt_tokens_details": None} == {
        **whole["usage"],
        "prompt_tokens_details": None,
    }
    assert events[-1]["choices"] == []


def test_a_stop_string_that_is_a_special_token(server: FakeServer) -> None:
    """D06: <|im_end|> never appears as text, and stops all the same."""
    body = {"prompt": "special:", "stop": "<|im_end|>"}
    plain = server.complete(**body)
    kept = server.complete(**body, include_stop_str_in_output=True)
    first = server.tokenizer.decode([70])
    assert plain["choices"][0]["text"] == first
    assert plain["choices"][0]["stop_reason"] == "<|im_end|>"
    assert kept["choices"][0]["text"] == first + "<|im_end|>"
    assert plain["usage"] == kept["usage"] | {
        "prompt_tokens_details": plain["usage"]["prompt_tokens_details"]
    }


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_is_streamed_only_when_asked_for(
    server: FakeServer, options: dict[str, Any] | None
) -> None:
    """D13: every chunk has a choice unless usage was asked for."""
    body = {"prompt": "alphabet:", "stream_options": options}
    events = server.stream("/v1/completions", body)
    assert all(len(event["choices"]) == 1 for event in events)
    assert all(event["usage"] is None for event in events)


def test_several_prompts_and_choices_are_indexed_prompt_by_prompt(server: FakeServer) -> None:
    """D14, D22: the prompt counts once for n choices, completions add up."""
    body = {"prompt": ["alphabet:", "dots:"], "n": 2}
    whole, events = both_ways(server, "/v1/completions", body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == ["ABCDEFGHIJ", "ABCDEFGHIJ", "so...", "so..."]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [text_of(events, index) for index in range(4)] == texts
    prompt = len(server.tokenizer.encode("alphabet:")) + len(server.tokenizer.encode("dots:"))
    assert whole["usage"]["prompt_tokens"] == prompt
    assert whole["usage"]["completion_tokens"] == 2 * 11 + 2 * 4
    assert whole["usage"]["total_tokens"] == prompt + 30
    assert events[-1]["usage"]["completion_tokens"] == 30
    assert events[-1]["usage"]["prompt_tokens"] == prompt


def test_token_ids_and_lists_of_them(server: FakeServer) -> None:
    """D22: [[1, 2], [3]] is two prompts."""
    one, two = server.tokenizer.encode("alphabet:"), server.tokenizer.encode("dots:")
    answer = server.complete([one, two], max_tokens=3)
    assert [choice["text"] for choice in answer["choices"]] == ["ABC", "so..."]
    assert server.complete(one, max_tokens=3)["choices"][0]["text"] == "ABC"
    assert server.complete(one, max_tokens=1, echo=True)["choices"][0]["text"] == "alphabet:A"


def test_cached_tokens_are_reported(server: FakeServer) -> None:
    prompt = "a prompt that is longer than two pages of sixteen tokens"
    first = server.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]
    again = server.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]
    assert first["cached_tokens"] == 0
    assert again["cached_tokens"] == 48


def test_a_completion_has_one_bos_and_no_eos(server: FakeServer) -> None:
    """D09: the tokenizer's BOS is added once, never doubled; its closing EOS is left out."""
    plain = server.complete("alphabet:", max_tokens=1)
    written = server.complete("<s>alphabet:", max_tokens=1)
    without = server.complete("alphabet:", max_tokens=1, add_special_tokens=False)
    assert plain["usage"]["prompt_tokens"] == len("alphabet:") + 1
    assert written["usage"]["prompt_tokens"] == len("alphabet:") + 1
    assert without["usage"]["prompt_tokens"] == len("alphabet:")


def test_logprobs_are_parallel_lists(server: FakeServer) -> None:
    body = {"prompt": "dots:", "logprobs": 2}
    whole, events = both_ways(server, "/v1/completions", body)
    found = whole["choices"][0]["logprobs"]
    assert found["tokens"] == ["s", "o", "..."]
    assert found["text_offset"] == [0, 1, 2]
    assert all(value <= 0 for value in found["token_logprobs"])
    assert all(len(top) == 2 for top in found["top_logprobs"])
    streamed: dict[str, list[Any]] = {key: [] for key in found}
    for event in events:
        for choice in event["choices"]:
            for key in found:
                streamed[key] += choice["logprobs"][key]
    assert streamed == found


def test_logprobs_zero_is_the_token_alone(server: FakeServer) -> None:
    found = server.complete("dots:", logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert found["tokens"] == ["s"]
    assert found["top_logprobs"] is None


def test_echo_with_logprobs_scores_the_prompt(server: FakeServer) -> None:
    """D10: one entry per prompt token, null first, the model's own numbers after it."""
    ids = server.tokenizer.encode("score me é")
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}
    whole, events = both_ways(server, "/v1/completions", body)
    choice = whole["choices"][0]
    assert choice["text"] == "score me é"
    assert choice["finish_reason"] == "length"
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(ids)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    for position in range(1, len(ids)):
        logits = server.runner.logits_after(ids[:position]).astype(float)
        expected = logits[ids[position]] - math.log(sum(math.exp(x) for x in logits))
        assert found["token_logprobs"][position] == pytest.approx(expected, abs=1e-3)
    assert found["text_offset"] == [0, 0, *range(1, 9), 9, 10]
    assert whole["usage"]["completion_tokens"] == 0
    assert events[0]["choices"][0]["text"] == "score me é"
    assert events[0]["choices"][0]["logprobs"] == found


def test_impossible_tokens_have_finite_logprobs(server: FakeServer) -> None:
    """D11: top_k 1, a bias of -100: valid JSON, finite numbers."""
    response = server.post(
        "/v1/completions",
        {
            "prompt": "dots:",
            "top_k": 1,
            "logprobs": 5,
            "logit_bias": {str(EOS): -100},
            "max_tokens": 3,
        },
    )
    assert response.status_code == 200
    assert "Infinity" not in response.text
    assert "NaN" not in response.text


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_a_tiny_temperature_is_greedy(server: FakeServer, temperature: float) -> None:
    """D18: the gap in the script is 50, so nothing else can be drawn."""
    body = {"prompt": "alphabet:", "temperature": temperature}
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "ABCDEFGHIJ"


def test_top_k_above_the_vocabulary_is_off(server: FakeServer) -> None:
    """D20."""
    for top_k in (-1, 0, 1, 300, 301, 10**7):
        assert server.complete("alphabet:", top_k=top_k)["choices"][0]["text"] == "ABCDEFGHIJ"


def test_a_seed_repeats_itself_and_its_choices_differ() -> None:
    body = {"prompt": "p", "temperature": 2, "max_tokens": 24, "n": 2, "seed": 7}
    with fake_server() as server:
        first = server.post("/v1/completions", body).json()["choices"]
        again = server.post("/v1/completions", body).json()["choices"]
        second = server.post("/v1/completions", {**body, "seed": 8, "n": 1}).json()["choices"]
    assert [choice["text"] for choice in first] == [choice["text"] for choice in again]
    assert first[0]["text"] != first[1]["text"]
    assert second[0]["text"] == first[1]["text"]


def test_ignore_eos_goes_on(server: FakeServer) -> None:
    answer = server.complete("dots:", ignore_eos=True, max_tokens=6)
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_default_is_the_rest_of_the_context() -> None:
    with fake_server({"p": "x" * 400}, max_model_len=64) as server:
        usage = server.complete("p")["usage"]
        assert usage["total_tokens"] == 64


@pytest.mark.parametrize("eos", [2, 3, 60])
def test_every_eos_id_stops(eos: int) -> None:
    """A11: all ids of the manifest stop; ignore_eos stops for none of them."""
    with fake_server({"p": [70, eos, 71]}, eos_token_ids=(2, 3, 60)) as server:
        stopped = server.complete("p")
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["usage"]["completion_tokens"] == 2
        assert stopped["choices"][0]["stop_reason"] is None
        ignored = server.complete("p", ignore_eos=True, max_tokens=3)
        assert ignored["usage"]["completion_tokens"] == 3


def test_the_models_defaults_are_used() -> None:
    with fake_server({"p": "abc"}, defaults=SamplingDefaults(temperature=0.0)) as server:
        answer = server.post("/v1/completions", {"prompt": "free text", "max_tokens": 8}).json()
        assert (
            answer["choices"][0]["text"]
            == server.complete("free text", max_tokens=8)["choices"][0]["text"]
        )


def sentencepiece_like() -> Tokenizer:
    """As Llama 2 has it: metaspace pieces with byte fallback, a space before every text."""
    pieces = ["<unk>", "<s>", "</s>", "▁"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [*"abcxy:", "▁a", "▁b", "▁c", "▁x"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("▁", "c"), ("▁", "x")]
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("out", ["▁b ▁c", "▁ ▁x", "<0xC3> <0xA9> a", "a <0xE2>"])
def test_spaces_and_letters_of_sentencepiece(out: str) -> None:
    """D01, D03: joined deltas are decode(prompt + output) without decode(prompt)."""
    raw = sentencepiece_like()
    ids = [raw.token_to_id(piece) for piece in out.split()]
    assert None not in ids
    tokenizer = PromptTokenizer(raw)
    with fake_server({"a": ids}, tokenizer=tokenizer, eos_token_ids=(2,)) as server:
        prompt = tokenizer.encode("a")
        expected = raw.decode(prompt + ids)[len(raw.decode(prompt)) :]
        body = {"prompt": "a", "max_tokens": len(ids)}
        whole, events = both_ways(server, "/v1/completions", body)
        assert whole["choices"][0]["text"] == expected
        assert text_of(events) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_when_asked_for(stream: bool) -> None:
    """llama-benchy asks for return_token_ids: as many as completion_tokens, whatever the text does.

    A letter of three bytes whose text comes late, then the EOS, which has no text at all.
    """
    with fake_server({"p": "a삼b"}) as server:
        body = {"prompt": "p", "temperature": 0, "return_token_ids": True, "n": 2}
        if stream:
            options = {"stream_options": {"include_usage": True}}
            parts = server.stream("/v1/completions", {**body, **options})
        else:
            parts = [server.complete(**body)]
        choices = [choice for part in parts for choice in part["choices"]]
        for index in range(2):
            mine = [choice for choice in choices if choice["index"] == index]
            ids = [i for choice in mine for i in choice["token_ids"]]
            assert ids == [*server.tokenizer.raw.encode("a삼b", add_special_tokens=False).ids, EOS]
            prompts = [c["prompt_token_ids"] for c in mine if c["prompt_token_ids"]]
            assert prompts == [server.tokenizer.raw.encode("p").ids[:-1]]
        assert parts[-1]["usage"]["completion_tokens"] == 2 * len(ids)
        assert server.complete("p")["choices"][0]["token_ids"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_a_chat(stream: bool) -> None:
    with fake_server({chat_prompt("hi"): "a삼b"}) as server:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0,
            "return_token_ids": True,
        }
        if stream:
            parts = server.stream("/v1/chat/completions", body)
        else:
            parts = [server.post("/v1/chat/completions", body).json()]
        ids = [i for part in parts for c in part["choices"] for i in c["token_ids"] or ()]
        assert ids == [*server.tokenizer.raw.encode("a삼b", add_special_tokens=False).ids, EOS]
        (prompt,) = [p["prompt_token_ids"] for p in parts if p["prompt_token_ids"]]
        assert server.tokenizer.decode(prompt).endswith("assistant\n")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_every_chunk(path: str) -> None:
    """guidellm asks for continuous_usage_stats: each chunk has the counts of its choice so far."""
    with fake_server({"p": "x" * 9, chat_prompt("p"): "x" * 9}) as server:
        asked = {"prompt": "p"} if "chat" not in path else {"messages": [_user("p")]}
        options = {"include_usage": True, "continuous_usage_stats": True}
        parts = server.stream(path, {**asked, "n": 2, "stream_options": options})
    for index in range(2):
        mine = [p["usage"] for p in parts if p["choices"] and p["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in mine]
        assert counts == sorted(counts)
        assert counts[-1] == 10, "nine and the EOS"
        assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in mine)
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 20


def test_usage_in_every_chunk_needs_usage(server: FakeServer) -> None:
    body = {"prompt": "alphabet:", "stream": True}
    answer = server.post(
        "/v1/completions", body | {"stream_options": {"continuous_usage_stats": True}}
    )
    assert answer.status_code == 400
    assert "only allowed when include_usage is true" in answer.json()["error"]["message"]


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
