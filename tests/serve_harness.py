"""A whole server over a fake runner: in process for most tests, on a real port for the rest.

    with fake_server({"Hello": " world"}) as server:
        server.post("/v1/completions", {"prompt": "Hello"}).json()

The tokenizer is a byte-level BPE without torch: every byte is a token, `...` and ` world` are one,
and <s> stands before every text. A script maps prompts to what the model says after them, as text
or as ids; then it says </s>. Prompts that are not in it are answered with pseudo-random ASCII;
without any script the logits are random, with nothing certain.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from fake_runner import FakeRunner
from shark_llm.engine.guidance import GrammarCompiler
from shark_llm.engine.loop import Engine
from shark_llm.engine.settings import EngineSettings
from shark_llm.runtime.runner import Phase, Row
from shark_llm.server.app import create_app
from shark_llm.server.chat_template import ChatTemplate
from shark_llm.server.lifecycle import Life, Loaded, bind
from shark_llm.server.metrics import Metrics
from shark_llm.server.params import SamplingDefaults
from shark_llm.server.settings import ServerSettings
from shark_llm.server.state import ServedModel, ServerState
from shark_llm.server.tokenizer import PromptTokenizer

MODEL = "fake/llama"
BOS, EOS, IM_START, IM_END = 0, 1, 2, 3
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 300  # a few rows more than the tokenizer has tokens
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Script = Mapping[str, str | Sequence[int]]


def byte_tokenizer() -> Tokenizer:
    """Ids: 0..3 special, then the 256 bytes in the alphabet's order, then the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(".", "."), ("..", "."), ("Ġ", "w"), ("Ġw", "o"), ("Ġwo", "r")]
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return tokenizer


def chat_prompt(*contents: str) -> str:
    """What TEMPLATE makes of user messages, without the BOS."""
    turns = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)
    return turns + "<|im_start|>assistant\n"


def scripted(tokenizer: PromptTokenizer, script: Script) -> Callable[[Sequence[int]], int]:
    """The `next_token` of a runner that says what the script says."""
    entries = []
    for prompt, answer in script.items():
        ids = tokenizer.encode(prompt)
        said = tokenizer.encode(answer, add_bos=False) if isinstance(answer, str) else list(answer)
        entries.append((ids, said))
    entries.sort(key=lambda entry: -len(entry[0]))  # the most special prompt first

    def next_token(history: Sequence[int]) -> int:
        for ids, said in entries:
            if list(history[: len(ids)]) == ids:
                position = len(history) - len(ids)
                return said[position] if position < len(said) else EOS
        return 4 + sum(history) * 31 % 90

    return next_token


@dataclass
class FakeServer:
    """An app with its parts, and a client that needs no port."""

    state: ServerState
    settings: ServerSettings
    tokenizer: PromptTokenizer
    runner: FakeRunner
    engine: Engine
    metrics: Metrics
    app: Any = field(init=False)

    def __post_init__(self) -> None:
        self.app = create_app(self.settings, self.state, self.metrics)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, timeout=30, **kwargs)

        return asyncio.run(send())

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **kwargs)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A successful, non-streaming completion."""
        response = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream that ends with [DONE]."""
        response = self.post(path, {"temperature": 0, **body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)

    def wait_idle(self) -> None:
        """Wait until the engine holds nothing; a leak never gets there."""
        assert self.engine.drain(10), self.engine.stats()
        for _ in range(200):
            stats = self.engine.stats()
            if stats.pages_held == 0 and stats.running == 0 and stats.waiting == 0:
                break
            threading.Event().wait(0.01)
        assert stats.pages_held == 0
        assert self.state.num_active == 0


def events_of(text: str, *, done: bool = True) -> list[dict[str, Any]]:
    """The JSON of each event; the last one must be [DONE] if `done`."""
    lines = [line.strip() for line in text.split("\n\n") if line.strip()]
    assert all(line.startswith("data: ") for line in lines)
    bodies = [line.removeprefix("data: ") for line in lines]
    assert (bodies[-1] == "[DONE]") == done
    return [json.loads(body) for body in bodies if body != "[DONE]"]


def parts(
    script: Script | None = None,
    *,
    defaults: SamplingDefaults | None = None,
    template: str | None = TEMPLATE,
    tokenizer: PromptTokenizer | None = None,
    max_model_len: int = 512,
    num_pages: int = 256,
    engine_settings: EngineSettings | None = None,
    on_forward: Callable[[int, Phase, Sequence[Row]], None] | None = None,
    step_seconds: float = 0.0,
    eos_token_ids: Sequence[int] = (EOS,),
) -> tuple[ServedModel, FakeRunner, Engine]:
    """A running engine over a scripted runner, and the model that a server makes of it."""
    tokenizer = tokenizer or PromptTokenizer(byte_tokenizer(), {"bos_token": "<s>"})
    runner = FakeRunner(
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        num_pages=num_pages,
        next_token=None if script is None else scripted(tokenizer, script),
        on_forward=on_forward,
        step_seconds=step_seconds,
    )
    engine = Engine(runner, engine_settings or EngineSettings(), eos_token_ids=eos_token_ids)
    engine.start()
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    served = ServedModel(
        name=MODEL,
        engine=engine,
        tokenizer=tokenizer,
        chat_template=None if template is None else ChatTemplate(template, names),
        max_model_len=engine.max_model_len,
        vocab_size=runner.vocab_size,
        defaults=defaults or SamplingDefaults(),
        grammars=GrammarCompiler(
            tokenizer.raw, vocab_size=runner.vocab_size, eos_token_ids=eos_token_ids
        ),
    )
    return served, runner, engine


@contextmanager
def fake_server(
    script: Script | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Iterator[FakeServer]:
    """A ready server in this process, without a port."""
    served, runner, engine = parts(script, **kwargs)
    state = ServerState()
    metrics = Metrics(MODEL)
    metrics.watch(engine.stats)
    state.become_ready(served)
    server = FakeServer(
        state=state,
        settings=ServerSettings(served_model_name=MODEL, **(settings or {})),
        tokenizer=served.tokenizer,
        runner=runner,
        engine=engine,
        metrics=metrics,
    )
    try:
        yield server
    finally:
        engine.stop()
        assert served.grammars is not None
        served.grammars.close()


@dataclass
class RealServer:
    """A server on a loopback port, whose event loop runs on a thread."""

    url: str
    life: Life
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    runner: FakeRunner
    engine: Engine
    exit_code: list[int]

    def stop(self) -> int:
        """As the first SIGTERM; returns the exit code."""
        self.request_stop()
        return self.join()

    def request_stop(self) -> None:
        self.loop.call_soon_threadsafe(self.life.request_stop)

    def join(self) -> int:
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()
        return self.exit_code[0]


@contextmanager
def real_server(
    script: Script | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    wait_ready: bool = True,
    before_loaded: Callable[[], None] | None = None,
    **kwargs: Any,
) -> Iterator[RealServer]:
    """A server on port 0, ready unless told otherwise, and stopped at the end."""
    served, runner, engine = parts(script, **kwargs)
    options = ServerSettings(served_model_name=MODEL, port=0, **(settings or {}))

    def load(report: Callable[[str], None]) -> Loaded:
        report("loading the fake")
        if before_loaded is not None:
            before_loaded()
        return Loaded(served=served, summary="fake")

    sock = bind(options.host, options.port)
    loop = asyncio.new_event_loop()
    life = Life(options, sock, load)
    exit_code: list[int] = []

    def run() -> None:
        exit_code.append(loop.run_until_complete(life.run(handle_signals=False)))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    server = RealServer(
        url=life.url,
        life=life,
        loop=loop,
        thread=thread,
        runner=runner,
        engine=engine,
        exit_code=exit_code,
    )
    try:
        if wait_ready:
            wait_for(lambda: life.state.phase == "ready")
        yield server
    finally:
        if thread.is_alive():
            server.stop()
        assert served.grammars is not None
        served.grammars.close()


def wait_for(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Poll until the condition holds."""
    for _ in range(int(timeout / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("timed out")
