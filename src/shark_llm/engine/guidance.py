"""Structured output: which tokens a grammar allows next, by the library llguidance.

    any thread        GrammarCompiler.compile   -> a thread of its own, which holds no lock
    engine thread     Grammar.start             -> a `Guide` per request: allowed, accept, ...

A guide depends on the tokens that its request generated and on nothing else. A preempted request
keeps its guide as it keeps its tokens: nothing is drawn again, so nothing has to be replayed.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from shark_llm.errors import RequestError

GrammarKind = Literal["json_schema", "regex", "choice"]

MAX_GRAMMAR_CHARS = 128 * 1024
"""The compiler recurses along a schema's references, and the stack's end is the process's end: a
text of this length cannot make a chain that passes `_STACK_BYTES`."""
_STACK_BYTES = 512 * 1024 * 1024  # address space; memory only as far as it is used
MAX_MULTIPLE = 20_000
"""Numbers of a schema's `multipleOf` are remainders to the library, as many states as the least
common multiple has: 20,000 take a second, two primes of five digits take hours."""
_CACHED_GRAMMARS = 32
_REASON_CHARS = 200
# A model that has lost its way writes spaces until its tokens are spent, if it may.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
# The library's defaults but for the states, which take 1 to 2 kB each and stay while the grammar
# is cached. Errors of a step would print the text that was generated.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class GuideError(Exception):
    """A grammar met a limit of the library while text was generated."""


@dataclass(frozen=True, kw_only=True)
class GrammarSource:
    """What a client asked for. `text` is a JSON schema, a regular expression (Rust's syntax, which
    matches the whole text), or a JSON list of strings; `param` names the field it came in."""

    kind: GrammarKind
    text: str
    param: str


class Guide:
    """Where one request stands in its grammar. Not thread-safe: the engine thread owns it."""

    __slots__ = ("_matcher", "_vocab_size")

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> npt.NDArray[np.bool_]:
        """(V,): the tokens that may come next; the end of text among them if all may end here.

        Raises:
            GuideError: the library gave up.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GuideError(_reason(self._matcher.get_error()))
        # A tokenizer with more or fewer tokens than the model has rows: cut off, or not allowed.
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """Take in an allowed token. If a limit is met here, the next `allowed` raises it."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """The grammar is satisfied, and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class Grammar:
    """A compiled grammar, to be shared by any number of requests."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def start(self) -> Guide:
        """A guide at the beginning of the text. Takes microseconds."""
        return Guide(self._matcher.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, one at a time, and remembers the last ones.

    Setting it up walks through the vocabulary and holds the interpreter lock for about a second per
    100,000 tokens: it belongs into loading. Raises `ValueError` for a kind of tokenizer that the
    library cannot read, and where no thread with a large stack can be had.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(
            tokenizer.to_str(),
            n_vocab=max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True)),
            # None: the library takes one by its name, and the request ends with the grammar.
            eos_token=sorted(eos_token_ids) or None,
        )
        self._cache: OrderedDict[tuple[GrammarKind, str], Grammar] = OrderedDict()  # the thread's
        self._jobs: SimpleQueue[tuple[Future[Grammar], GrammarSource] | None] = SimpleQueue()
        # A daemon: the end of the process waits for no compile.
        thread = threading.Thread(target=self._run, name="grammar", daemon=True)
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise ValueError(f"no thread with a stack of {_STACK_BYTES} bytes: {error}") from error
        finally:
            threading.stack_size(before)

    def compile(self, source: GrammarSource) -> Future[Grammar]:
        """Compile on the compiler's thread, which lets all others run. A future that is cancelled
        before its turn costs nothing.

        Raises, from the future, `RequestError` (400) with the library's reason.
        """
        future: Future[Grammar] = Future()
        self._jobs.put((future, source))
        return future

    def close(self) -> None:
        """End the thread after what was handed in before."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, source = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                grammar = self._compile(source)
            except BaseException as error:  # whoever waits for the future gets it
                future.set_exception(error)
            else:
                future.set_result(grammar)

    def _compile(self, source: GrammarSource) -> Grammar:
        if len(source.text) > MAX_GRAMMAR_CHARS:
            raise _refused(
                source,
                f"has {len(source.text)} characters, at most {MAX_GRAMMAR_CHARS} are taken; "
                "simplify it",
            )
        key = (source.kind, source.text)
        grammar = self._cache.get(key)
        if grammar is None:
            grammar = self._cache[key] = self._compile_anew(source)
            if len(self._cache) > _CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return grammar

    def _compile_anew(self, source: GrammarSource) -> Grammar:
        if source.kind == "json_schema":
            _check_multiples(source)
        try:
            text = _llguidance_grammar(source)
        except ValueError as error:
            raise _refused(source, f"cannot be used: {_reason(str(error))}") from None
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first of a grammar takes milliseconds
        if matcher.is_error():
            raise _refused(source, f"cannot be used: {_reason(matcher.get_error())}")
        return Grammar(matcher, self._vocab_size)


def _llguidance_grammar(source: GrammarSource) -> str:
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    if source.kind == "choice":
        choices: Sequence[str] = json.loads(source.text)
        return LLMatcher.grammar_from_regex("|".join(map(_literal, choices)))
    return LLMatcher.grammar_from_json_schema(
        source.text, overrides={"whitespace_pattern": _WHITESPACE}
    )


def _check_multiples(source: GrammarSource) -> None:
    multiple = 1
    try:
        left: list[Any] = [json.loads(source.text)]
    except (ValueError, RecursionError):
        return  # the library says what is wrong with it
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            step = value.get("multipleOf")
            if isinstance(step, int | float) and 0 < abs(step) < math.inf:
                digits = Decimal(str(step)).as_tuple().digits  # powers of ten cost nothing
                multiple = math.lcm(multiple, int("".join(map(str, digits)).rstrip("0")))
                if multiple > MAX_MULTIPLE:
                    found = str(multiple) if multiple < 10**20 else "a huge number"
                    raise _refused(
                        source,
                        f"the least common multiple of its multipleOf is {found} (without powers "
                        f"of ten), at most {MAX_MULTIPLE} can be kept to; use smaller numbers",
                    )


def _literal(text: str) -> str:
    """The regular expression of exactly this text: only letters and digits stand for themselves."""
    plain = (
        char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text
    )
    return "".join(plain)


def _refused(source: GrammarSource, message: str) -> RequestError:
    return RequestError(f"{source.param}: {message}", param=source.param, code="invalid_grammar")


def _reason(error: str) -> str:
    """The library's reason on one short line: of a message with a picture of the place, its end."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = (named or lines or ["for no known reason"])[0]
    return reason if len(reason) <= _REASON_CHARS else reason[:_REASON_CHARS] + "..."
