"""Deltas join to the whole, whatever the tokens and however the text is cut."""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shark_llm.engine.detokenizer import IncrementalDetokenizer, StopMatcher
from tiny_tokenizers import byte_level, sentencepiece

KINDS = {
    "byte_level": byte_level(),
    "llama": sentencepiece("llama"),
    "metaspace": sentencepiece("metaspace"),
}
TEXT = st.text(alphabet="ab .é삼겹살😀\u200d👩ABCDEF\ufffd", max_size=30)


def reference(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> str:
    """decode(prompt + output) without decode(prompt), or without what they have in common where
    the output changed how the end of the prompt reads."""
    whole = tokenizer.decode([*prompt, *output])
    before = tokenizer.decode(list(prompt))
    return whole[len(os.path.commonprefix([whole, before])) :]  # noqa: RUF071


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tokens(kind: str, data: st.DataObject) -> None:
    """Also nonsense: broken letters, special tokens, ids beyond the vocabulary."""
    tokenizer = KINDS[kind]
    size = tokenizer.get_vocab_size()
    # Bytes from 0x80 on, often, so that letters are begun and broken off.
    high = [i for i in range(size) if "\ufffd" in tokenizer.decode([i])]
    ids = st.one_of(st.integers(0, size + 3), st.sampled_from(high))
    prompt = data.draw(st.lists(ids, min_size=1, max_size=12), label="prompt")
    output = data.draw(st.lists(ids, max_size=80), label="output")
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    joined = "".join([*map(detokenizer.push, output), detokenizer.flush()])
    assert joined == reference(tokenizer, prompt, output)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=200, deadline=None)
@given(before=TEXT.filter(bool), after=TEXT)
def test_any_text(kind: str, before: str, after: str) -> None:
    tokenizer = KINDS[kind]
    prompt = tokenizer.encode(before, add_special_tokens=False).ids
    output = tokenizer.encode(after, add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    pushed = [detokenizer.push(token) for token in output]
    joined = "".join([*pushed, detokenizer.flush()])
    assert joined == reference(tokenizer, prompt, output)
    if "\ufffd" not in before + after and tokenizer.decode(prompt) == before:
        assert "\ufffd" not in joined


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=12),
    include_stop=st.booleans(),
)
def test_stop_matcher_is_blind_to_chunks(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    """Against a search that looks at every beginning of the whole text."""
    expected, matched = text, None
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            matched = max(hits, key=len)
            expected = text[: end if include_stop else end - len(matched)]
            break
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    matcher = StopMatcher(stops, include_stop=include_stop)
    chunks = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert "".join([*map(matcher.push, chunks), matcher.flush()]) == expected
    assert matcher.matched == matched
