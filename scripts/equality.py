"""Serve a model at several tensor parallel degrees and hold its answers to transformers.

For each dtype and tp a bundle is built for this CPU and served; each prompt is answered alone, then
all of them together with sampled requests between them. transformers in float32, on the same files
(for bf16 with the weights rounded to it), reads prompt and answer in one pass without a cache and
judges each token: it must be the likeliest, or less likely than that one by no more than rounding
can do. Bundles, the checkpoint and the answers lie in .cache/equality; what the standard model
says is kept in docs/correctness, with the table of docs/correctness.md.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equality_results
import model as demo_model  # scripts/model.py: fetches the model
import numpy as np
import numpy.typing as npt
import torch
from benchmarks import machine, servers
from benchmarks.servers import ServerError
from equality_results import Served
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from shark_llm.checkpoint.export_hf import export_hf
from shark_llm.checkpoint.open import open_checkpoint

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "equality"
TPS = (1, 2, 3, 5, 8)
TOLERANCE = {"f32": 1e-3, "bf16": 5e-3}
"""Of a log-probability, as a share of the largest |logit| of the sequence. f32 has another order of
sums, which the huge activations of a first token magnify to some 1e-4; bf16 has besides a KV cache
that is rounded to 8 bits of mantissa in each layer: up to 3.1e-3 was measured."""
SHOWN = 5
"""Of what is wrong with the answers of one way of asking; the file has all of it."""
TOP = 20
"""Log-probabilities that are compared for each token: the most that a server gives."""
SAMPLED = 2
"""Requests with a temperature in the mixed batch."""
TIMEOUT = 300.0

LONG = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 14
PROMPTS = {
    "one token": "The",
    "a line": "The capital of France is",
    "chat": "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "prose": "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "long": LONG,
}
"""Of 1 to some 300 tokens: below a page, across pages, and beyond one chunk of a prefill."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the server said to one prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top: tuple[dict[int, float], ...]
    """The log-probabilities of the likeliest tokens, for each token of the answer."""


@dataclass(kw_only=True)
class Verdict:
    """What the judge says of some answers; `Served` says what the figures are."""

    tokens: int = 0
    near_ties: int = 0
    behind: float = 0.0
    error: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Judge:
    """transformers in float32, without a cache."""

    def __init__(self, directory: Path, dtype: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        if dtype == "bf16":
            # Weights alone: Module.to would round the rotary frequencies as well, by up to 0.4 %,
            # and the angles of a hundred tokens with them by tenths of a radian.
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_(weight.bfloat16())
        self.model = model
        self._tolerance = TOLERANCE[dtype]
        self._known: dict[tuple[int, ...], npt.NDArray[np.float32]] = {}

    def judge(self, answers: Sequence[Answer]) -> Verdict:
        """Every token of every answer, each behind what the server itself said before it."""
        verdict = Verdict()
        for number, answer in enumerate(answers):
            logits = self._logits(answer)
            scale = float(np.abs(logits).max())
            wanted = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            for i, (token, top) in enumerate(zip(answer.tokens, answer.top, strict=True)):
                verdict.tokens += 1
                behind = float(logits[i].max() - logits[i][token]) / scale
                verdict.near_ties += behind > 0
                verdict.behind = max(verdict.behind, behind)
                error = max(abs(top[each] - float(wanted[i][each])) for each in top) / scale
                verdict.error = max(verdict.error, error)
                # Both of two logits may be off, in opposite directions.
                if behind > 2 * self._tolerance or error > self._tolerance:
                    verdict.wrong.append(
                        f"answer {number}, token {i}: {token} is {behind:.2g} behind "
                        f"{int(logits[i].argmax())}, log-probabilities are off by {error:.2g}"
                    )
        return verdict

    @torch.no_grad()
    def _logits(self, answer: Answer) -> npt.NDArray[np.float32]:
        """(tokens of the answer, V) f32: before each of them."""
        sequence = (*answer.prompt, *answer.tokens[:-1])
        if sequence not in self._known:
            found = self.model(torch.tensor([sequence])).logits[0, len(answer.prompt) - 1 :]
            self._known[sequence] = found.numpy()
        return self._known[sequence]


def ask(port: int, prompt: Sequence[int], max_tokens: int, *, seed: int | None = None) -> Answer:
    """POST /generate: greedy, or with temperature 0.8 and a seed. Raises ServerError."""
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    if seed is not None:
        sampling |= {"temperature": 0.8, "seed": seed}
    body = {
        "input_ids": list(prompt),
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": TOP,
    }
    connection = http.client.HTTPConnection(servers.HOST, port, timeout=TIMEOUT)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/generate", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise ServerError(f"HTTP {response.status}: {text}")
    said = json.loads(text)
    tops = said["meta_info"]["output_top_logprobs"]
    return Answer(
        prompt=tuple(prompt),
        tokens=tuple(said["output_ids"]),
        top=tuple({token: value for value, token, _ in top} for top in tops),
    )


def alone(port: int, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """One after the other."""
    return [ask(port, prompt, max_tokens) for prompt in prompts]


def mixed(port: int, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """All at once, in batches that they join and leave, with sampled requests between them.

    Raises ServerError when a sampled request with the same seed has another answer (B13).
    """
    length = len(prompts[0])
    sampled = [list(prompts[-1][: length + 20])] * SAMPLED
    with ThreadPoolExecutor(len(prompts) + SAMPLED) as pool:
        others = [pool.submit(ask, port, prompt, max_tokens, seed=7) for prompt in sampled]
        answers = list(pool.map(lambda prompt: ask(port, prompt, max_tokens), prompts))
        texts = {other.result().tokens for other in others}
    if len(texts) > 1:
        raise ServerError(f"requests with the same seed have {len(texts)} answers")
    return answers


@contextmanager
def serving(bundle: Path) -> Iterator[int]:
    """shark-serve on a free port, without prefix cache: every answer computes all of its prompt."""
    port = servers.free_port()
    command = [str(Path(sys.executable).with_name("shark-serve")), "--artifacts-dir", str(bundle)]
    command += ["--port", str(port), "--max-num-seqs", "4", "--kv-cache-tokens", "4096"]
    command += ["--no-enable-prefix-caching", "--log-level", "warning"]
    cpus = sorted(os.sched_getaffinity(0))
    with servers.Server(servers.OURS, command, port=port, cpus=cpus):
        yield port


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts of token ids, for a model that knows no language."""
    source = random.Random(seed)
    return [source.choices(range(vocab_size), k=length) for length in lengths]


def build(checkpoint: Path, dtype: str, tp: int, batch_sizes: Sequence[int]) -> Path:
    """The bundle of `dtype` and `tp` for this CPU; shark-compile itself finds what it can reuse."""
    bundle = CACHE / f"{dtype}-tp{tp}"
    command = [str(Path(sys.executable).with_name("shark-compile")), "--compile-target", "host"]
    command += ["--hf-model", str(checkpoint), "--dtype", dtype, "--tp", str(tp)]
    # The compiler's checks of itself take a third of the time, and change nothing in the module.
    command += ["--extra-compile-arg=--verify=false"]
    for phase in ("prefill", "decode"):
        command += [f"--batch-sizes-{phase}", *map(str, batch_sizes)]
    command += ["--output-artifacts-dir", str(bundle)]
    command += ["--output-dev-artifacts-dir", str(CACHE / f"{dtype}-tp{tp}-dev")]
    if subprocess.run(command).returncode:
        raise SystemExit("equality: shark-compile failed; its message is above")
    return bundle


def demo_checkpoint() -> Path:
    """SmolLM2-135M-Instruct as safetensors, dequantized from the GGUF file that the demo uses."""
    directory = CACHE / "SmolLM2-135M-Instruct"
    if not (directory / "config.json").exists():
        demo_model.fetch()
        staged = directory.with_suffix(".part")
        export_hf(open_checkpoint(demo_model.MODEL), staged, dtype=torch.float32)
        staged.replace(directory)
    return directory


def measure(
    checkpoint: Path, dtype: str, tp: int, judge: Judge, options: argparse.Namespace
) -> list[Served]:
    """A row for each way of asking."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS.values()]
    rows, started = [], machine.now()
    with serving(build(checkpoint, dtype, tp, options.batch_sizes)) as port:
        for how, way in (("alone", alone), ("mixed", mixed)):
            answers = way(port, prompts, options.max_tokens)
            verdict = judge.judge(answers)
            texts = [tokenizer.decode(answer.tokens) for answer in answers]
            (CACHE / f"{dtype}-tp{tp}-{how}.json").write_text(json.dumps(texts, indent=1))
            print(f"equality: {dtype} tp {tp} {how}: {_summary(verdict)}", flush=True)
            for line in verdict.wrong[:SHOWN]:
                print(f"equality:   {line}", flush=True)
            rows.append(
                Served(
                    dtype=dtype,
                    tp=tp,
                    how=how,
                    batch_sizes=options.batch_sizes,
                    answers=[list(answer.tokens) for answer in answers],
                    near_ties=verdict.near_ties,
                    behind=verdict.behind,
                    error=verdict.error,
                    wrong=verdict.wrong,
                    tolerance=TOLERANCE[dtype],
                    started=started,
                    commit=machine.commit(),
                    command=shlex.join(["scripts/equality", *sys.argv[1:]]),
                )
            )
    return rows


def _summary(verdict: Verdict) -> str:
    return (
        f"{verdict.tokens - verdict.near_ties} of {verdict.tokens} tokens are transformers' own, "
        f"{verdict.near_ties} near-ties, at most {verdict.behind:.1e} behind, "
        f"{len(verdict.wrong)} wrong; error {verdict.error:.1e}"
    )


def main() -> None:
    """Prints the table, and ends with 1 when anything is beyond the tolerance."""
    parser = argparse.ArgumentParser(prog="scripts/equality", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--hf-model", type=Path, help="a directory with safetensors; default: SmolLM2-135M-Instruct"
    )
    add("--dtype", choices=tuple(TOLERANCE), nargs="+", default=list(TOLERANCE))
    add("--tp", type=int, nargs="+", default=list(TPS))
    add("--max-tokens", type=int, default=48, help="of each answer")
    add("--batch-sizes", type=int, nargs="+", default=[1, 4], help="of the modules' entry points")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    checkpoint, rows = options.hf_model or demo_checkpoint(), []
    for dtype in options.dtype:
        judge = Judge(checkpoint, dtype)
        for tp in options.tp:
            rows += measure(checkpoint, dtype, tp, judge, options)
            if options.hf_model is None:
                equality_results.write(equality_results.keep(rows))
    print(f"\n{equality_results.table(rows)}\n\nequality: the texts are in {CACHE}")
    if any(row.wrong for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
