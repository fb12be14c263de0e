"""Whatever the model would rather say: what comes out in time is what was asked for.

JSON is judged by the package jsonschema, and regular expressions by Python's own `re`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import Driver
from fake_runner import FakeRunner
from serve_harness import EOS, VOCAB_SIZE, byte_tokenizer
from shark_llm.engine.guidance import Grammar, GrammarCompiler, GrammarKind, GrammarSource

TOKENIZER = byte_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
MAX_TOKENS = 160


def compiled(kind: GrammarKind, text: str) -> Grammar:
    return COMPILER.compile(GrammarSource(kind=kind, text=text, param="p")).result(timeout=60)


NAMES = st.sampled_from(["a", "b c", "é", '"'])
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 99}),
    st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
    st.lists(NAMES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.just({"type": "string", "pattern": "^[a-f]{1,4}$"}),
)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties)[::2],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, max_size=3).map(_object),
        st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {"type": "array", "items": pair[0], "maxItems": pair[1]}
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda schemas: {"anyOf": schemas}),
    ),
    max_leaves=4,
)
SAMPLING = st.fixed_dictionaries(
    {"seed": st.integers(0, 1000), "temperature": st.sampled_from([0.0, 0.7, 1.5])},
    optional={
        "top_k": st.integers(2, 40),
        "top_p": st.floats(0.1, 1),
        "min_tokens": st.integers(0, 30),
        "ignore_eos": st.booleans(),
        "frequency_penalty": st.just(0.7),
        "logit_bias": st.just({EOS: 9.0}),
        "logprobs": st.just(1),
    },
)


@settings(max_examples=120, deadline=None)
@given(schema=SCHEMAS, sampling=SAMPLING, prompt=st.lists(st.integers(4, 250), min_size=1))
def test_finished_json_validates(
    schema: dict[str, Any], sampling: dict[str, Any], prompt: list[int]
) -> None:
    grammar = compiled("json_schema", json.dumps(schema))
    driver = Driver(FakeRunner(vocab_size=VOCAB_SIZE), eos_token_ids=(EOS,))
    answer = driver.ask(prompt, max_tokens=MAX_TOKENS, grammar=grammar, **sampling)
    if answer.finish.finish_reason == "stop":
        jsonschema.validate(json.loads(TOKENIZER.decode(answer.tokens)), schema)
    else:  # white space and strings took all there was: a true beginning
        assert answer.finish.completion_tokens == MAX_TOKENS
        guide = grammar.start()
        for token in answer.tokens:
            assert guide.allowed()[token]
            guide.accept(token)


PIECES = st.recursive(
    st.sampled_from(["a", "[b-e]", "é", r"\.", "[^x]", "0+"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.integers(0, 3)).map(lambda pair: f"({pair[0]}){{{pair[1]},5}}"),
        inner.map(lambda piece: f"({piece})?"),
    ),
    max_leaves=5,
)


@settings(max_examples=120, deadline=None)
@given(pattern=PIECES, sampling=SAMPLING)
def test_finished_text_matches(pattern: str, sampling: dict[str, Any]) -> None:
    driver = Driver(FakeRunner(vocab_size=VOCAB_SIZE), eos_token_ids=(EOS,))
    grammar = compiled("regex", pattern)
    answer = driver.ask([7, 8], max_tokens=MAX_TOKENS, grammar=grammar, **sampling)
    if answer.finish.finish_reason == "stop":
        assert re.fullmatch(pattern, TOKENIZER.decode(answer.tokens), re.DOTALL)


@settings(max_examples=60, deadline=None)
@given(choices=st.lists(st.text(max_size=8), min_size=1, max_size=6), sampling=SAMPLING)
def test_finished_choice_is_one_of_them(choices: list[str], sampling: dict[str, Any]) -> None:
    driver = Driver(FakeRunner(vocab_size=VOCAB_SIZE), eos_token_ids=(EOS,))
    grammar = compiled("choice", json.dumps(choices))
    answer = driver.ask([7, 8], max_tokens=MAX_TOKENS, grammar=grammar, **sampling)
    assert answer.finish.finish_reason == "stop"
    assert TOKENIZER.decode(answer.tokens) in choices


@settings(max_examples=40, deadline=None)
@given(
    work=st.lists(st.tuples(st.sampled_from(["regex", "json", ""]), SAMPLING), min_size=2),
    num_pages=st.integers(24, 60),
    max_num_seqs=st.integers(1, 6),
)
def test_guided_requests_are_as_if_alone(
    work: list[tuple[str, dict[str, Any]]], num_pages: int, max_num_seqs: int
) -> None:
    """Beside others, with the cache warm, and preempted for want of pages."""
    grammars = {
        "regex": compiled("regex", "([a-z]{2}[0-9] )+"),
        "json": compiled("json_schema", '{"type":"object","additionalProperties":{"type":"null"}}'),
        "": None,
    }
    runner = FakeRunner(page_size=4, num_pages=num_pages, vocab_size=VOCAB_SIZE, max_model_len=80)
    driver = Driver(
        runner, eos_token_ids=(EOS,), max_num_seqs=max_num_seqs, max_num_batched_tokens=30
    )
    options = [
        {"max_tokens": 40, "grammar": grammars[kind], **sampling, "min_tokens": 0}
        for kind, sampling in work
    ]
    answers = [driver.add([5, 6, 7, i], **each) for i, each in enumerate(options)]
    driver.run()
    for i, (answer, each) in enumerate(zip(answers, options, strict=True)):
        fresh = FakeRunner(page_size=4, num_pages=256, vocab_size=VOCAB_SIZE, max_model_len=80)
        single = Driver(
            fresh, eos_token_ids=(EOS,), enable_prefix_caching=False, max_num_batched_tokens=100
        )
        expected = single.ask([5, 6, 7, i], **each)
        assert answer.events[:-1] == expected.events[:-1]
        assert answer.finish.finish_reason == expected.finish.finish_reason
