"""The equivalence ladder's parts: kinds of checkpoints, the judge, and ways to walk a sequence.

The judge is transformers in float32 on the same files. All else is a `ModelRunner`: the eager model
here (`EagerRunner`), a compiled module in tests/iree. `walk` and `generate` take either.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from fake_runner import best_tokens, softmax_sums
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.golden import read_parameters
from shark_llm.model.eager import EagerModel, EagerSettings
from shark_llm.model.llama import AttentionForm
from shark_llm.runtime.module import pack_rows
from shark_llm.runtime.runner import ModelRunner, Phase, Row, StepOutput
from shark_llm.sharding.apply import TORCH_DTYPES
from shark_llm.sharding.plan import plan_parameters
from tiny import tiny_config, tiny_weights, write_tiny

# Tiny products are no work for two threads, which on a busy machine wait for each other.
torch.set_num_threads(1)

PAGE = 16
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 100)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
NINE_THREE = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}

KINDS: dict[str, dict[str, Any]] = {
    "gqa": tiny_config(),
    "mha": tiny_config(num_key_value_heads=4),
    "mqa": tiny_config(num_key_value_heads=1),
    "head_dim": tiny_config(hidden_size=160, head_dim=64),  # A05: 160 / 4 is 40
    "tied": tiny_config(tie_word_embeddings=True),
    "biases": tiny_config(attention_bias=True, mlp_bias=True),
    "linear": tiny_config(rope_scaling={"type": "linear", "factor": 4.0}),
    "llama3": tiny_config(rope_scaling=LLAMA3),
    "yarn": tiny_config(rope_scaling=YARN),
    "nine_three": tiny_config(**NINE_THREE),  # SmolLM2's heads
    "eight_two": tiny_config(hidden_size=128, num_attention_heads=8),  # B01
    "vocab_257": tiny_config(vocab_size=257, hidden_size=128, num_attention_heads=8),  # B05
    "mistral": tiny_config(
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=None,
        attention_bias=...,
        mlp_bias=...,
    ),
}


def write_kind(directory: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """The tiny checkpoint of `kind`, with weights in `dtype`."""
    config = KINDS[kind] | {"torch_dtype": str(dtype).removeprefix("torch.")}
    return write_tiny(directory, config=config, weights=tiny_weights(config, dtype=dtype))


def token_ids(count: int, vocab_size: int = 256, seed: int = 0) -> list[int]:
    """`count` fixed random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


class Judge:
    """transformers in float32, no cache: the logits after every token of a sequence."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """(len(tokens), V) f32."""
        out: npt.NDArray[np.float32] = self.model(torch.tensor([tokens])).logits[0].numpy()
        return out

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """`count` tokens, and the gap between the best two logits of each choice."""
        tokens, gaps = list(prompt), []
        for _ in range(count):
            last = self.logits(tokens)[-1]
            second, first = np.sort(last)[-2:]
            tokens.append(int(last.argmax()))
            gaps.append(float(first - second))
        return tokens[len(prompt) :], gaps


class EagerRunner:
    """The eager model as a ModelRunner that pads to compiled batch sizes like the real one."""

    prefill_batch_sizes = (1, 4)
    decode_batch_sizes = (1, 4)

    def __init__(
        self,
        directory: Path,
        *,
        tp: int = 1,
        dtype: str = "f32",
        form: AttentionForm = "matmul",
        narrow_operands: bool = False,
        num_pages: int = 64,
    ) -> None:
        checkpoint = open_checkpoint(directory)
        config = checkpoint.config
        self.page_size, self.num_pages = PAGE, num_pages
        self.vocab_size, self.max_model_len = config.vocab_size, config.max_position_embeddings
        self.model = EagerModel(
            config=config,
            parameters=read_parameters(checkpoint, TORCH_DTYPES[dtype]),
            plan=plan_parameters(config, tp),
            tp=tp,
            settings=EagerSettings(
                page_size=PAGE,
                num_pages=num_pages,
                attention_form=form,
                narrow_operands=narrow_operands,
            ),
        )

    def forward(self, phase: Phase, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
        sizes = self.prefill_batch_sizes if phase == "prefill" else self.decode_batch_sizes
        batch_size = next(size for size in sizes if size >= len(rows))
        inputs = pack_rows(rows, batch_size, self.page_size, phase)
        logits = self.model.forward(phase, *(torch.from_numpy(array) for array in inputs))
        return logits.numpy()[: len(rows)]

    def run(self, phase: Phase, rows: Sequence[Row]) -> StepOutput:
        logits = self.forward(phase, rows)
        return StepOutput(
            best_tokens=best_tokens(logits),
            read_logits=lambda: logits,
            read_sums=partial(softmax_sums, logits),
        )

    def fill(self, value: float) -> None:
        """Overwrite the whole pool."""
        for caches in self.model.caches:
            for cache in caches:
                cache.fill_(value)

    def close(self) -> None:
        """Nothing is held."""


class Sequencer:
    """One sequence on a runner: its tokens so far, and its pages, taken when a token needs one."""

    def __init__(self, tokens: Sequence[int], first_page: int, page_size: int = PAGE) -> None:
        self.tokens = list(tokens)
        self.first_page = first_page
        self.page_size = page_size

    def row(self, start: int, stop: int) -> Row:
        """Tokens start .. stop - 1, with exactly the pages that hold positions below `stop`."""
        pages = -(-stop // self.page_size)
        return Row(
            tokens=self.tokens[start:stop],
            start=start,
            pages=range(self.first_page, self.first_page + pages),
        )


def logits_of(runner: ModelRunner, phase: Phase, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
    """One step: the logits, by which the runner's own choice and its sums must go."""
    output = runner.run(phase, rows)
    logits = output.read_logits()
    np.testing.assert_array_equal(output.best_tokens, best_tokens(logits))
    scales = np.linspace(0.5, 2, len(logits), dtype=np.float32)
    sound = output.best_tokens < runner.vocab_size
    np.testing.assert_allclose(
        output.read_sums(scales)[sound], softmax_sums(logits, scales)[sound], rtol=1e-5, atol=1e-7
    )
    return logits


def walk(
    runner: ModelRunner, tokens: Sequence[int], prompt: int, *, chunk: int | None = None
) -> npt.NDArray[np.float32]:
    """Prefill `prompt` tokens (in chunks), then decode the rest one by one, forcing `tokens`.

    Returns the logits after tokens prompt - 1 .. len(tokens) - 1. A last chunk of one token is a
    decode row, at start 0 too, as the engine does it.
    """
    sequence = Sequencer(tokens, first_page=1)
    step = chunk or prompt
    logits = None
    for start in range(0, prompt, step):
        stop = min(start + step, prompt)
        phase: Phase = "decode" if stop - start == 1 else "prefill"
        logits = logits_of(runner, phase, [sequence.row(start, stop)])[0]
    assert logits is not None
    found = [logits.copy()]
    for position in range(prompt, len(tokens)):
        row = sequence.row(position, position + 1)
        found.append(logits_of(runner, "decode", [row])[0].copy())
    return np.stack(found)


def generate(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], count: int, *, first_page: int = 1
) -> list[list[int]]:
    """Greedy continuations of all prompts, run together, every row with pages of its own."""
    width = max(-(-(len(prompt) + count) // PAGE) for prompt in prompts)
    rows = [Sequencer(prompt, first_page + i * width) for i, prompt in enumerate(prompts)]
    logits: list[npt.NDArray[np.float32] | None] = [None] * len(rows)
    for phase, chosen in (
        ("decode", [i for i, row in enumerate(rows) if len(row.tokens) == 1]),
        ("prefill", [i for i, row in enumerate(rows) if len(row.tokens) > 1]),
    ):
        if chosen:
            whole = [rows[i].row(0, len(rows[i].tokens)) for i in chosen]
            for i, of_row in zip(chosen, logits_of(runner, phase, whole), strict=True):  # type: ignore[arg-type]
                logits[i] = of_row.copy()
    generated: list[list[int]] = [[] for _ in rows]
    for step in range(count):
        for row, out, of_row in zip(rows, generated, logits, strict=True):
            assert of_row is not None
            out.append(int(of_row.argmax()))
            row.tokens.append(out[-1])
        if step + 1 < count:
            last = [row.row(len(row.tokens) - 1, len(row.tokens)) for row in rows]
            logits = [of_row.copy() for of_row in logits_of(runner, "decode", last)]
    return generated


def assert_close(
    found: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32], tolerance: float, what: str
) -> None:
    """Logits differ by at most `tolerance`, absolutely; NaN and infinity differ from everything."""
    assert found.shape == wanted.shape, f"{what}: {found.shape} instead of {wanted.shape}"
    error = float(np.abs(found - wanted).max())
    assert error <= tolerance, f"{what}: logits differ by {error:.3g}, allowed are {tolerance:.3g}"


def assert_same_choices(
    found: Sequence[int], wanted: Sequence[int], gaps: Sequence[float], tolerance: float
) -> None:
    """Greedy tokens are equal up to the first choice whose best two are a near-tie."""
    for i, (token, expected, gap) in enumerate(zip(found, wanted, gaps, strict=True)):
        if gap <= 2 * tolerance:
            return  # either is right, and what follows is another text
        assert token == expected, f"token {i}: {token} instead of {expected}, gap {gap:.3g}"
