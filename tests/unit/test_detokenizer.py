"""Text in final pieces, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from shark_llm.engine.detokenizer import WINDOW, IncrementalDetokenizer, StopMatcher
from tiny_tokenizers import byte_level, sentencepiece

KINDS = {
    "byte_level": byte_level(),
    "llama": sentencepiece("llama"),
    "metaspace": sentencepiece("metaspace"),
}


@pytest.fixture(params=sorted(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in ids, tokens
    return ids


def pieces(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in output), detokenizer.flush()]


@pytest.mark.parametrize(
    "text", ["é", "삼겹살", "👩‍👩‍👧", "é 삼겹살 👩‍👩‍👧 then ASCII", "\ufffd real"]
)
def test_letters_are_never_broken(tokenizer: Tokenizer, text: str) -> None:
    """D01: letters of several tokens come whole, none is dropped."""
    prompt = encode(tokenizer, "the test")
    output = encode(tokenizer, "the test" + text)[len(prompt) :]
    if tokenizer.decode(prompt + output) != "the test" + text:  # the merge went across
        output = encode(tokenizer, text)
    whole = tokenizer.decode(prompt + output)
    result = pieces(tokenizer, prompt, output)
    assert "".join(result) == whole[len("the test") :]
    assert "".join(result).count("\ufffd") == text.count("\ufffd")


def test_cut_inside_a_letter() -> None:
    """D01: max_tokens in mid-letter gives what the whole decode gives, at the end only."""
    tokenizer = KINDS["byte_level"]
    prompt = encode(tokenizer, "a")
    output = encode(tokenizer, "b 😀")[:-1]
    result = pieces(tokenizer, prompt, output)
    assert "".join(result) == tokenizer.decode(prompt + output)[1:] == "b \ufffd"
    assert "\ufffd" not in "".join(result[:-1])


def test_text_before_half_a_letter_is_not_held_back() -> None:
    tokenizer = KINDS["byte_level"]
    (first, *_) = encode(tokenizer, " 😀")  # a space and the first bytes of the letter
    assert IncrementalDetokenizer(tokenizer, [0]).push(first) == " "


def test_byte_run_is_released_by_the_next_token() -> None:
    tokenizer = KINDS["llama"]
    run = ids_of(tokenizer, "<0xF0>", "<0x9F>", "<0x98>", "<0x80>")
    result = pieces(tokenizer, ids_of(tokenizer, "▁a"), [*run, *ids_of(tokenizer, "b")])
    assert result == ["", "", "", "", "😀b", ""]


def test_special_token_does_not_end_a_byte_run() -> None:
    """Skipped tokens are gone before the decoder runs, so bytes around them make one letter."""
    tokenizer = KINDS["llama"]
    output = ids_of(tokenizer, "<0xC3>", "</s>", "<0xA9>", "b")
    assert "".join(pieces(tokenizer, ids_of(tokenizer, "▁a"), output)) == "éb"


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_spaces_of_sentencepiece(kind: str) -> None:
    """D03: prompt "a", ids ▁b ▁c; ids ▁ ▁x: no space is lost, none is cut twice."""
    tokenizer = KINDS[kind]
    prompt = ids_of(tokenizer, "<s>", "▁a")
    assert pieces(tokenizer, prompt, ids_of(tokenizer, "▁b", "▁c")) == [" b", " c", ""]
    output = ids_of(tokenizer, "▁", "▁x")
    assert "".join(pieces(tokenizer, prompt, output)) == "  x"
    assert tokenizer.decode(prompt + output) == "a  x"


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_first_space_of_all_is_dropped(kind: str) -> None:
    tokenizer = KINDS[kind]
    output = ids_of(tokenizer, "▁the", "▁a")
    assert pieces(tokenizer, ids_of(tokenizer, "<s>"), output) == ["the", " a", ""]


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer: Tokenizer) -> None:
    """A20: the embedding has more rows than the tokenizer has tokens."""
    prompt = encode(tokenizer, "a")
    output = [10**6, *encode(tokenizer, "b"), tokenizer.get_vocab_size() + 1]
    expected = tokenizer.decode(prompt + output)[1:]
    assert "".join(pieces(tokenizer, prompt, output)) == expected


def test_special_tokens_on_request(tokenizer: Tokenizer) -> None:
    prompt, output = encode(tokenizer, "a"), ids_of(tokenizer, "</s>")
    assert "".join(pieces(tokenizer, prompt, output)) == ""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=False)
    assert detokenizer.push(output[0]) == "</s>"


def test_prompt_that_ends_inside_a_letter() -> None:
    """Prompts of token ids may end anywhere: the letter then belongs to the output."""
    tokenizer = KINDS["byte_level"]
    ids = encode(tokenizer, "a b 😀 c")
    cut = next(i for i in range(len(ids)) if tokenizer.decode(ids[:i]).endswith("\ufffd"))
    assert "".join(pieces(tokenizer, ids[:cut], ids[cut:])) == "😀 c"


def test_only_a_window_is_decoded(tokenizer: Tokenizer) -> None:
    """The cost of a token does not grow with the text."""
    prompt = encode(tokenizer, "the test " * 200)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    assert len(detokenizer._ids) <= 8
    output = encode(tokenizer, "test é a " * 200)
    text = ""
    for token in output:
        text += detokenizer.push(token)
        assert len(detokenizer._ids) <= 2 * WINDOW
    whole = tokenizer.decode(prompt + output)
    assert text + detokenizer.flush() == whole[len(tokenizer.decode(prompt)) :]


def feed(text: str, stops: Sequence[str], *, size: int = 1, include_stop: bool = False) -> str:
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown = "".join(matcher.push(text[i : i + size]) for i in range(0, len(text), size))
    return shown + matcher.flush()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 10])
def test_stop_over_several_tokens(size: int) -> None:
    """D04: nothing of the stop string was sent before it was complete."""
    assert feed("ABCDEFGHIJ", ["DEFGHIJ"], size=size) == "ABC"


@pytest.mark.parametrize("size", [1, 3, 10])
def test_stop_is_included_on_request(size: int) -> None:
    """D07: the text ends with the stop, nothing comes after."""
    text = "ABCDEFGHIJ"
    assert feed(text, ["DEF"], size=size, include_stop=True) == "ABCDEF"


@pytest.mark.parametrize(
    ("text", "stops", "shown", "matched"),
    [
        ("a...", [".."], "a", ".."),
        ("abc", ["b"], "a", "b"),
        ("hello", ["lo", "he"], "", "he"),
        ("one two", ["two", "one"], "", "one"),
        ("xabcd", ["abcd", "bc"], "xa", "bc"),  # "bc" is complete first
        ("xabc", ["bc", "abc"], "x", "abc"),  # both end together: the longer one
        ("aab", ["ab"], "a", "ab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("abab", ["abac"], "abab", None),
        ("text", [], "text", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 10])
def test_stop_is_cut_exactly(
    text: str, stops: list[str], shown: str, matched: str | None, size: int
) -> None:
    """D06: inside a token, the earliest of several, possible beginnings released at the end."""
    matcher = StopMatcher(stops)
    parts = [matcher.push(text[i : i + size]) for i in range(0, len(text), size)]
    assert "".join(parts) + matcher.flush() == shown
    assert matcher.matched == matched


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a ST") == "a "
    assert matcher.push("x") == "STx"
    assert matcher.push("STO") == ""
    assert matcher.flush() == "STO"


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == "a"
    assert matcher.push("c.") == ""
    assert matcher.flush() == ""


def test_tokens_without_text_cost_nothing(tokenizer: Tokenizer) -> None:
    """A model that goes on past its EOS (ignore_eos) says nothing but special tokens: all of them
    were decoded again at each, so a stream of n took n * n / 2."""
    special = next(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
    prompt = [*encode(tokenizer, "the test"), *[special] * 500]
    decoded = 0

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def decode(self, ids: Sequence[int], **options: bool) -> str:
            nonlocal decoded
            decoded += len(ids)
            return str(tokenizer.decode(ids, **options))

    detokenizer = IncrementalDetokenizer(Counting(), prompt)  # type: ignore[arg-type]
    output = [special] * 500 + encode(tokenizer, " a test") + [special] * 500
    text = "".join([*(detokenizer.push(token) for token in output), detokenizer.flush()])
    whole = tokenizer.decode(prompt + output)
    assert text == whole[len(tokenizer.decode(prompt)) :]
    assert decoded < 1000
