"""What --weights-dtype costs: perplexity and first choices on a fixed text, beside llama.cpp.

    python scripts/quantization_quality.py [--model DIR] [--windows N]

The text is Python's own reference manual as the standard library carries it (`pydoc_data.topics`),
cut into windows of 512 tokens. The judge is transformers in f32 on the checkpoint's weights; the
rows after it are transformers on weights that went through what a bundle stores, once with
activations rounded as CPUs with AVX2 do, and, where the
Python package llama-cpp-python is there, llama.cpp on the same model as q8_0, for which it rounds
activations to 8 bits too. DIR is a Hugging Face directory; without it the model of scripts/model.py
is taken, whose weights were on the grid of Q4_1 before.

perplexity            exp of the mean negative log likelihood of the next token
same first choice     share of positions where the highest logit is the judge's
mean KL               of the next token's distribution from the judge's, in nats
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import model as demo_model
import torch
import transformers
from llama_cpp_logits import LlamaCpp
from tokenizers import Tokenizer

from shark_llm.checkpoint.export_hf import export_hf
from shark_llm.checkpoint.gguf import GgufCheckpoint
from shark_llm.model import llama
from shark_llm.sharding.quantize import dequantize, quantize

WINDOW = 512

Logits = Callable[[list[int]], torch.Tensor]
"""Of a window: (S, V) f32."""


@dataclass
class Score:
    """Sums over the windows so far."""

    loss: float = 0.0
    same: int = 0
    divergence: float = 0.0
    count: int = 0

    def add(self, ids: list[int], logits: torch.Tensor, judge: torch.Tensor) -> None:
        found, wanted = (torch.log_softmax(x[:-1], dim=-1) for x in (logits, judge))  # (S-1, V)
        following = torch.tensor(ids[1:])[:, None]
        self.loss -= float(found.gather(1, following).sum())
        self.same += int((found.argmax(-1) == wanted.argmax(-1)).sum())
        self.divergence += float((wanted.exp() * (wanted - found)).sum())
        self.count += len(ids) - 1

    def row(self, name: str) -> str:
        perplexity = torch.tensor(self.loss / self.count).exp().item()
        return (
            f"| {name} | {perplexity:.3f} | {self.same / self.count:.1%} | "
            f"{self.divergence / self.count:.1e} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--windows", type=int, default=8, help=f"of {WINDOW} tokens (default: 8)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        directory = arguments.model or _demo_model(Path(room, "hf"))
        windows = list(_windows(directory, arguments.windows))
        judge = _transformers(directory, lambda weight: weight)
        judged = [judge(ids) for ids in windows]
        print("| weights | perplexity | same first choice | mean KL |\n|---|---|---|---|")
        print(_score(judged, judged, windows).row("f32"), flush=True)
        for name, stored, rounds in (
            ("bf16", lambda weight: weight.to(torch.bfloat16).float(), False),
            ("bf16 with int8 weights", _as_int8, False),
            ("bf16 with int8 weights and activations", _as_int8, True),
        ):
            gc.collect()
            found = map(_transformers(directory, stored, round_rows=rounds), windows)
            print(_score(found, judged, windows).row(name), flush=True)
        if arguments.model is None and (peer := _llama_cpp(Path(room, "q8_0.gguf"))) is not None:
            print(_score(map(peer, windows), judged, windows).row("llama.cpp q8_0"))


def _demo_model(directory: Path) -> Path:
    demo_model.fetch()
    export_hf(GgufCheckpoint(demo_model.MODEL), directory, dtype=torch.float32)
    return directory


def _windows(directory: Path, count: int) -> Iterator[list[int]]:
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    for start in range(0, count * WINDOW, WINDOW):
        yield ids[start : start + WINDOW]


def _transformers(
    directory: Path, stored: Callable[[torch.Tensor], torch.Tensor], *, round_rows: bool = False
) -> Logits:
    """transformers in f32; `stored` is what becomes of each weight, and `round_rows` rounds what
    every product takes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(stored(weight))
    for module in model.modules() if round_rows else ():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(_rounded)

    @torch.no_grad()
    def logits(ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
        return found

    return logits


def _rounded(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    (x,) = inputs
    return (llama.round_rows(x.reshape(-1, x.shape[-1])).reshape(x.shape),)


def _as_int8(weight: torch.Tensor) -> torch.Tensor:
    if weight.ndim == 2:
        return dequantize(*quantize(weight))
    return weight.to(torch.bfloat16).float()


def _llama_cpp(file: Path) -> Logits | None:
    """None: the package is not there."""
    try:
        import llama_cpp  # type: ignore[import-not-found]  # only where somebody put it
    except ImportError:
        return None
    peer = LlamaCpp(llama_cpp)
    peer.quantize(demo_model.MODEL, file, "LLAMA_FTYPE_MOSTLY_Q8_0")
    return lambda ids: torch.from_numpy(peer.logits(file, ids))


def _score(
    found: Iterable[torch.Tensor], judged: list[torch.Tensor], windows: list[list[int]]
) -> Score:
    score = Score()
    for ids, logits, judge in zip(windows, found, judged, strict=True):
        score.add(ids, logits, judge)
    return score


if __name__ == "__main__":
    main()
