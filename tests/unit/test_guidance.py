"""Grammars: what they allow, what is refused, and that a compile holds up nobody."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from engine_driver import Driver, alone
from fake_runner import FakeRunner
from serve_harness import EOS, VOCAB_SIZE, byte_tokenizer
from shark_llm.engine import guidance
from shark_llm.engine.guidance import (
    MAX_GRAMMAR_CHARS,
    Grammar,
    GrammarCompiler,
    GrammarKind,
    GrammarSource,
    Guide,
)
from shark_llm.engine.request import SamplingParams
from shark_llm.engine.sampling import SamplerState, sample
from shark_llm.errors import RequestError

TOKENIZER = byte_tokenizer()
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    yield made
    made.close()


def source(kind: GrammarKind, text: str) -> GrammarSource:
    return GrammarSource(kind=kind, text=text, param="field")


def compiled(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> Grammar:
    return compiler.compile(source(kind, text)).result(timeout=60)


def ids(text: str) -> list[int]:
    result: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return result


def take(guide: Guide, text: str) -> bool:
    """Feed a text; whether every token of it was allowed."""
    for token in ids(text):
        if not guide.allowed()[token]:
            return False
        guide.accept(token)
    return True


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "[0-9]{2}-[a-c]+", ["12-a", "99-abc"], ["1-a", "12-d", "12a"]),
        ("regex", "^ab$", ["ab"], ["abc", "b"]),
        ("regex", "é+", ["éé"], ["e"]),
        (
            "choice",
            json.dumps(["yes", "no", 'quo"te\n', "삼"]),
            ['quo"te\n', "삼", "no"],
            ["maybe"],
        ),
        ("json_schema", json.dumps(POINT), ['{"x": 1, "y": -20}', '{"x":1,"y":2}'], ['{"y": 1}']),
        ("json_schema", '{"type":"object"}', ['{"a": [1, null, {"b": "c"}]}', "{}"], ["[1]"]),
        ("json_schema", "{}", ["3", '"a"', "[[]]"], ["x"]),
        ("json_schema", '{"enum":[1,"a"]}', ["1", '"a"'], ["2"]),
        ("json_schema", '{"type":"number","multipleOf":0.25}', ["0.75", "3"], ["0.3"]),
        ("json_schema", '{"type":"integer","multipleOf":5000000}', ["15000000"], ["15"]),
    ],
)
def test_what_is_allowed(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, good: list[str], bad: list[str]
) -> None:
    grammar = compiled(compiler, kind, text)
    for each in good:
        guide = grammar.start()
        assert take(guide, each), each
        assert guide.allowed()[EOS]
    for each in bad:
        guide = grammar.start()
        assert not (take(guide, each) and guide.allowed()[EOS]), each


def test_a_finished_grammar_allows_only_the_end(compiler: GrammarCompiler) -> None:
    guide = compiled(compiler, "json_schema", json.dumps(POINT)).start()
    assert not guide.allowed()[EOS]
    assert take(guide, '{"x":1,"y":2}')
    assert guide.is_complete
    assert np.flatnonzero(guide.allowed()).tolist() == [EOS]


def test_guides_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, "regex", "ab|cd")
    first, second = grammar.start(), grammar.start()
    assert take(first, "a")
    assert take(second, "cd")
    assert second.is_complete
    assert not first.is_complete
    assert take(grammar.start(), "ab")


def test_whitespace_is_bounded(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, "json_schema", '{"type":"object"}')
    assert take(grammar.start(), "{" + "\n" + " " * 60 + '"a": 1}')
    assert not take(grammar.start(), "{" + " \n" * 40)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", r"a(?=b)", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("json_schema", '{"type":"banana"}', "Invalid type: banana"),
        ("json_schema", '{"type":"string","pattern":"("}', "unclosed group"),
        ("json_schema", '{"$ref":"#/nowhere"}', "does not exist"),
        ("json_schema", '{"$ref":"https://example.com/x.json"}', "not fetch"),
        ("json_schema", '{"not":{}}', "Unimplemented"),
        ("json_schema", "false", "object schema"),
        ("json_schema", "[]", "object schema"),
        ("json_schema", '{"enum":[]}', "Unsatisfiable"),
        ("json_schema", '{"multipleOf":1e400}', ""),
        ("json_schema", '{"multipleOf":Infinity}', ""),
        ("json_schema", '{"a":' * 5000 + "1" + "}" * 5000, "recursion limit"),
        ("regex", "a" * (MAX_GRAMMAR_CHARS + 1), f"at most {MAX_GRAMMAR_CHARS}"),
        ("json_schema", '{"type":"integer","multipleOf":1234567}', "multiple of its multipleOf"),
        (
            "json_schema",
            '{"allOf":[{"multipleOf":10007},{"items":{"multipleOf":10.009}}]}',
            "is 100160063",
        ),
        ("json_schema", '{"multipleOf":1' + "3" * 3000 + "}", "a huge number"),
    ],
)
def test_a_bad_grammar_is_refused_on_one_line(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, reason: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(compiler, kind, text)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "invalid_grammar", "field")
    assert reason in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 400


_CHAIN = """
import sys
sys.path[:0] = [{tests!r}]
from serve_harness import byte_tokenizer
from shark_llm.engine.guidance import MAX_GRAMMAR_CHARS, GrammarCompiler, GrammarSource
compiler = GrammarCompiler(byte_tokenizer(), vocab_size=300, eos_token_ids=(1,))
link = {link!r}
chain, i = [], 0
while sum(map(len, chain)) < MAX_GRAMMAR_CHARS - 100:
    chain.append('"%x":%s,' % (i, link % (i + 1)))
    i += 1
text = '{{"d":{{' + "".join(chain) + '"%x":{{}}}},"$ref":"#/d/0"}}' % i
assert len(text) <= MAX_GRAMMAR_CHARS
future = compiler.compile(GrammarSource(kind="json_schema", text=text, param="p"))
print(type(future.exception()).__name__)
if future.exception() is None:
    future.result().start().allowed()
"""


@pytest.mark.parametrize(
    "link", ['{"items":{"$ref":"#/d/%x"}}', '{"allOf":[{"$ref":"#/d/%x"}]}', '{"$ref":"#/d/%x"}']
)
def test_a_chain_of_references_does_not_end_the_process(link: str) -> None:
    """Seen: the library recurses along `$ref`, and 1,000 of them overflowed a thread's usual stack,
    which ended the server for everybody."""
    code = _CHAIN.format(tests=str(__file__).rsplit("/", 2)[0], link=link)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("NoneType", "RequestError")


def test_the_same_text_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiled(compiler, "regex", "once+")
    assert compiled(compiler, "regex", "once+") is first
    for i in range(guidance._CACHED_GRAMMARS):
        compiled(compiler, "regex", f"other{i}")
    assert compiled(compiler, "regex", "once+") is not first


def test_a_cancelled_compile_is_left_out(compiler: GrammarCompiler) -> None:
    """Its client has gone: what was never begun does not hold up the next."""
    links = {f"{i:x}": {"items": {"$ref": f"#/d/{i + 1:x}"}} for i in range(1500)}
    slow = json.dumps({"d": links | {f"{1500:x}": {}}, "$ref": "#/d/0"})
    first = compiler.compile(source("json_schema", slow))
    gone = compiler.compile(source("json_schema", slow + " "))
    assert gone.cancel()
    assert compiled(compiler, "regex", "next") is not None
    assert first.done()
    assert gone.cancelled()


def test_a_compile_lets_other_threads_run(compiler: GrammarCompiler) -> None:
    """A schema that takes long to compile; meanwhile this thread keeps its pace."""
    links = {f"{i:x}": {"items": {"$ref": f"#/d/{i + 1:x}"}} for i in range(3000)}
    text = json.dumps({"d": links | {f"{3000:x}": {}}, "$ref": "#/d/0"})
    future = compiler.compile(source("json_schema", text))
    gaps, last = [0.0], time.perf_counter()
    while not future.done():
        time.sleep(0.001)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    future.result()
    assert sum(gaps) > 0.05
    assert max(gaps) < sum(gaps) / 2


def state_of(grammar: Grammar, **params: Any) -> SamplerState:
    sampling = SamplingParams(**({"max_tokens": 9, "temperature": 0, "grammar": grammar} | params))
    return SamplerState(sampling, (), (EOS,))


def draw(state: SamplerState, **likes: float) -> int:
    """Sample with EOS the most likely, then the given texts of one token."""
    logits = np.zeros(VOCAB_SIZE, np.float32)
    logits[EOS] = 100
    for text, value in likes.items():
        logits[ids(text)[0]] = value
    result = sample(logits, int(logits.argmax()), state)
    assert result is not None
    state.accept(result.token_id)
    return result.token_id


def test_the_mask_comes_after_bias_and_penalties(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, "choice", '["a","b"]')
    state = state_of(grammar, logit_bias={ids("c")[0]: 100.0, ids("b")[0]: 5.0})
    assert draw(state, a=3.0) == ids("b")[0]
    assert state.is_complete


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_min_tokens_and_ignore_eos_put_the_end_off_while_it_can_be(
    compiler: GrammarCompiler, temperature: float
) -> None:
    digits = {token for digit in "0123456789" for token in ids(digit)}
    grammar = compiled(compiler, "regex", "[0-9]{1,3}")
    state = state_of(grammar, min_tokens=2, temperature=temperature)
    assert draw(state) in digits
    assert draw(state) in digits
    assert draw(state) == EOS
    state = state_of(grammar, ignore_eos=True, temperature=temperature)
    assert all(draw(state) in digits for _ in range(3))
    assert state.is_complete
    empty = state_of(compiled(compiler, "choice", '[""]'), min_tokens=5, temperature=temperature)
    assert draw(empty) == EOS


def test_a_limit_met_on_the_way_ends_one_request(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(step_max_items=60, verbose_errors=False)
    monkeypatch.setattr(guidance, "_LIMITS", limits)
    objects = [{"type": "object", "properties": {f"a{i}": {}}} for i in range(60)]
    text = json.dumps(
        {"type": "object", "properties": {"n": {"anyOf": objects}}, "required": ["n"]}
    )
    fresh = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    grammar = compiled(fresh, "json_schema", text)
    wanted = [*ids('{"n":{"a1":1}}'), EOS]
    runner = FakeRunner(vocab_size=VOCAB_SIZE, next_token=lambda history: wanted[len(history) - 2])
    driver = Driver(runner, eos_token_ids=(EOS,))
    guided = driver.add([5, 6], max_tokens=60, grammar=grammar)
    other = driver.add([7, 8], max_tokens=5)
    driver.run()
    assert guided.error.code == "grammar_too_complex"
    assert "\n" not in guided.error.message
    assert other.finish.completion_tokens == 5
    fresh.close()


def test_preempted_requests_go_on_where_they_were(compiler: GrammarCompiler) -> None:
    """Pages for one and a half requests: one is preempted, both come out as alone."""
    grammar = compiled(compiler, "regex", "([a-z]{3}-){8,12}end")
    runner = FakeRunner(page_size=4, num_pages=16, vocab_size=VOCAB_SIZE, max_model_len=120)
    driver = Driver(runner, eos_token_ids=(EOS,), max_num_batched_tokens=40)
    options: dict[str, Any] = {
        "max_tokens": 60,
        "grammar": grammar,
        "temperature": 1.0,
        "logprobs": 1,
        "frequency_penalty": 0.5,
    }
    prompts = [[9, 8, 7], [6, 5, 4, 3]]
    answers = [driver.add(p, seed=i, **options) for i, p in enumerate(prompts)]
    driver.run()
    assert driver.core.stats().preemptions > 0
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        expected = alone(runner, prompt, seed=i, **options)
        assert answer.events[:-1] == expected.events[:-1]
        assert answer.finish.finish_reason == "stop"


def test_without_an_eos_the_text_ends_with_the_grammar() -> None:
    compiler = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=())
    grammar = compiled(compiler, "choice", '["yes","no"]')
    driver = Driver(FakeRunner(vocab_size=VOCAB_SIZE), eos_token_ids=())
    answer = driver.ask([5], max_tokens=40, grammar=grammar)
    assert TOKENIZER.decode(answer.tokens) in ("yes", "no")
    assert answer.finish.finish_reason == "stop"
    compiler.close()


@pytest.mark.parametrize("vocab_size", [200, 265, 400])
def test_rows_and_tokens_may_differ_in_number(vocab_size: int) -> None:
    """A20: more tokens than the model has rows, as many, and fewer."""
    compiler = GrammarCompiler(TOKENIZER, vocab_size=vocab_size, eos_token_ids=(EOS,))
    allowed = compiled(compiler, "regex", r"(?s:.)+").start().allowed()
    assert allowed.shape == (vocab_size,)
    assert not allowed[265:].any()
    assert allowed[ids("a")[0]]
    compiler.close()


def test_without_room_for_the_stack_it_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a tokenizer of an unknown kind, the server then starts without grammars."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ValueError, match="stack"):
        GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


def test_the_compiler_leaves_the_stack_size_of_others_alone() -> None:
    before = threading.stack_size()
    GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)).close()
    assert threading.stack_size() == before
