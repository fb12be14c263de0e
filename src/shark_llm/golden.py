"""The golden check: a compiled module against the eager model, before its bundle is published.

It runs what goes wrong in the field: a prefill that ends inside a page, decode across the page
boundary, a prefill from an offset, a batch with an unused row, and all of it in a KV pool filled
with NaN. A module that computes something else is not published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shark_llm.artifacts.manifest import SUM_BLOCK, GoldenReport, Manifest
from shark_llm.checkpoint.source import Checkpoint
from shark_llm.errors import VerificationError
from shark_llm.export.packed import LinearForm
from shark_llm.model import llama
from shark_llm.model.config import ModelConfig
from shark_llm.model.eager import EagerModel, EagerSettings
from shark_llm.runtime.module import IreeRunner, pack_rows
from shark_llm.runtime.runner import Phase, Row, StepOutput
from shark_llm.sharding.plan import scale_name
from shark_llm.sharding.quantize import quantize

TOLERANCES = {"f32": 1e-3, "f16": 1e-2, "bf16": 5e-2}
"""Largest |logit difference| allowed, as a share of the largest |logit| (at least 1). Both sides
compute in the same precision; what differs is the order of sums, and single roundings to the
weights' dtype that it flips."""

ROUNDED_TOLERANCE = 0.1
"""The same where activations are rounded to 8 bits: a sum in another order moves some of them by a
whole step, and these move others in the layers behind."""

SUM_TOLERANCE = 1e-4
"""Of a sum of exponentials, or of the best token's weight, where the sum is less."""

DECODE_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class GoldenStep:
    """One call of the module, and what it is to show."""

    what: str
    phase: Phase
    rows: tuple[Row, ...]


def read_parameters(
    checkpoint: Checkpoint, dtype: torch.dtype, *, quantized: bool = False
) -> dict[str, torch.Tensor]:
    """All weights in memory, as they are compiled: in `dtype`, or matrices quantized."""
    parameters = {}
    for name, info in checkpoint.parameters.items():
        whole = checkpoint.read(name, 0, info.shape[0])
        if quantized and whole.ndim == 2:
            parameters[name], parameters[scale_name(name)] = quantize(whole)
        else:
            parameters[name] = whole.to(dtype)
    return parameters


def golden_steps(manifest: Manifest) -> Iterator[GoldenStep]:
    """The calls of the check, in order; pages are handed out so that nothing overlaps."""
    page, vocab = manifest.page_size, manifest.vocab_size
    decode_steps = min(DECODE_STEPS, manifest.max_model_len - 1)
    first = min(2 * page - 2, manifest.max_model_len - decode_steps)
    ids = [(7919 * i + 13) % vocab for i in range(first + DECODE_STEPS + 3 * page)]
    pages = list(range(1, 2 + (first + DECODE_STEPS) // page))

    def prefill(what: str, *rows: Row) -> GoldenStep:
        return GoldenStep(what=what, phase="prefill", rows=rows)

    def held(count: int, pages: list[int]) -> list[int]:
        return pages[: -(-count // page)]

    yield prefill("prefill", Row(tokens=ids[:first], start=0, pages=held(first, pages)))
    for i in range(first, first + decode_steps):
        row = Row(tokens=[ids[i]], start=i, pages=held(i + 1, pages))
        yield GoldenStep(what="decode across a page boundary", phase="decode", rows=(row,))
    if manifest.max_model_len >= 2 * page:
        tail = ids[page : page + min(3, page)]
        offset = Row(tokens=tail, start=page, pages=[pages[0], pages[-1] + 1])
        yield prefill("prefill from an offset", offset)
    batches = {e.phase: e.batch_size for e in manifest.entry_points if e.batch_size > 2}
    other = [pages[-1] + 2]
    short = ids[5 : 5 + max(1, min(page - 1, manifest.max_model_len - 1))]
    if "prefill" in batches:
        yield prefill(
            "prefill of two rows beside unused ones",
            Row(tokens=short, start=0, pages=other),
            Row(tokens=ids[:first], start=0, pages=held(first, pages)),
        )
    else:
        yield prefill("prefill of a second sequence", Row(tokens=short, start=0, pages=other))
    if "decode" in batches and decode_steps:
        yield GoldenStep(
            what="decode of two rows beside unused ones",
            phase="decode",
            rows=(
                Row(tokens=[ids[first]], start=first, pages=held(first + 1, pages)),
                Row(tokens=[ids[0]], start=len(short), pages=other),
            ),
        )


def check_golden(
    runner: IreeRunner,
    manifest: Manifest,
    config: ModelConfig,
    parameters: Mapping[str, torch.Tensor],
    *,
    form: LinearForm,
) -> GoldenReport:
    """Run the steps on both and compare logits. Raises VerificationError at the first that differs.

    `form` is that of the module's products.

    The runner's pool must have `golden_pages(manifest)` pages; it is poisoned first.
    """
    eager = EagerModel(
        config=config,
        parameters=parameters,
        plan=manifest.plan,
        tp=manifest.tp,
        settings=EagerSettings(
            page_size=manifest.page_size,
            num_pages=golden_pages(manifest),
            narrow_operands=form.form == "plain",
            round_rows=form.rounds_rows(
                quantized=manifest.weights_dtype is not None, min_rows=manifest.page_size
            ),
        ),
    )
    runner.poison()
    for caches in eager.caches:
        for cache in caches:
            cache.fill_(float("nan"))
    share = ROUNDED_TOLERANCE if eager.settings.round_rows else TOLERANCES[manifest.dtype]
    worst, allowed, prompt_tokens, decode_steps = 0.0, 0.0, 0, 0
    for step in golden_steps(manifest):
        inputs = pack_rows(step.rows, len(step.rows), manifest.page_size, step.phase)
        wanted = eager.forward(step.phase, *(torch.from_numpy(a) for a in inputs)).numpy()
        if not np.isfinite(wanted).all():
            raise VerificationError(
                f"golden check, {step.what}: the model itself overflows in {manifest.dtype}; "
                "build it with --dtype bf16 or f32"
            )
        output = runner.run(step.phase, step.rows)
        found = output.read_logits()
        tolerance = share * max(1.0, float(np.abs(wanted).max()))
        error = float(np.abs(found - wanted).max())
        if not error <= tolerance:  # also when the module gives NaN
            raise VerificationError(
                f"golden check, {step.what} of {len(step.rows)} rows: logits differ by {error:.3g} "
                f"from the eager model, at most {tolerance:.3g} are allowed: the module computes "
                "something else than the model and must not be served; report it as a compiler bug"
            )
        if (output.best_tokens != found.argmax(axis=1)).any():
            raise VerificationError(
                f"golden check, {step.what} of {len(step.rows)} rows: the best tokens "
                f"{output.best_tokens.tolist()} are not those of the logits, "
                f"{found.argmax(axis=1).tolist()}: the module must not be served; report it as a "
                "compiler bug"
            )
        _check_sums(step, output, found)
        worst, allowed = max(worst, error), max(allowed, tolerance)
        if step.phase == "prefill":
            prompt_tokens += sum(len(row.tokens) for row in step.rows)
        else:
            decode_steps += 1
    return GoldenReport(
        max_abs_error=worst,
        tolerance=allowed,
        prompt_tokens=prompt_tokens,
        decode_steps=decode_steps,
    )


def _check_sums(step: GoldenStep, output: StepOutput, logits: npt.NDArray[np.float32]) -> None:
    """Raise VerificationError unless the module adds up these logits of its own as torch does."""
    scales = np.linspace(0.5, 2, len(logits), dtype=np.float32)
    operands = (torch.from_numpy(a) for a in (logits, output.best_tokens, scales))
    wanted = llama.softmax_sums(SUM_BLOCK, *operands).numpy()
    found = output.read_sums(scales)
    if not np.allclose(found, wanted, rtol=SUM_TOLERANCE, atol=SUM_TOLERANCE):
        raise VerificationError(
            f"golden check, {step.what} of {len(logits)} rows: the sums that sampling needs differ "
            f"by {float(np.abs(found - wanted).max()):.3g}, at most {SUM_TOLERANCE:.3g} of one are "
            "allowed: the module must not be served; report it as a compiler bug"
        )


def golden_pages(manifest: Manifest) -> int:
    """Pages of the pool that the steps need, scratch page included."""
    return 1 + max(max(row.pages) for step in golden_steps(manifest) for row in step.rows)
