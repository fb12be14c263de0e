"""llama.cpp's side, through the low-level API of llama-cpp-python, in that package's environment.

Its batch is filled before the clock starts; what is timed is llama_decode, to the logits.
"""

from __future__ import annotations

import ctypes
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found]  # only in its own environment

from benchmarks import timing, worker

MICRO_BATCH = 512
"""llama.cpp's own default."""
GGML_TYPES = {"f32": 0, "f16": 1}
FILE_TYPES = {
    "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "f32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}
WARNING = 3


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    if level >= WARNING and level != WARNING + 2:  # 5 continues a line of whatever level
        print(text.decode(errors="replace"), end="")


def convert(source: str, destination: str, dtype: str) -> None:
    """Write the GGUF file `source` anew with matrices in `dtype` (bf16, f16, f32 or int8)."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[dtype]
    parameters.allow_requantize = True
    staged = Path(destination + ".part")
    code = llama_cpp.llama_model_quantize(source.encode(), str(staged).encode(), parameters)
    if code != 0:
        raise RuntimeError(f"llama_model_quantize to {dtype} ended with {code}")
    staged.replace(destination)


@dataclass(frozen=True)
class Form:
    """How llama.cpp attends, and keeps several sequences."""

    flash: bool
    unified: bool

    def named(self, sequences: int) -> dict[str, str]:
        """As the result keeps it."""
        names = {"attention": "flash" if self.flash else "plain"}
        return names if sequences == 1 else names | {"kv": "one" if self.unified else "each"}


class LlamaSide:
    """One loaded GGUF file, and the case being measured."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._model: Any = None
        self._context: Any = None
        self._memory: Any = None
        self._batch: Any = None
        self._phase = "decode"
        self._rows = self._tokens = 0

    def open(self, model: str, threads: int, kv_dtype: str) -> dict[str, str]:
        """Load; returns the package's version, and what llama.cpp says it was built with."""
        self._threads, self._kv_type = threads, GGML_TYPES[kv_dtype]
        self._model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {model}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        return {"version": llama_cpp.__version__, "build": build_features()}

    def prepare(self, phase: str, batch: int, context: int, steps: int) -> dict[str, str]:
        """Make a context of `batch` sequences; for decode, fill each with `context` tokens.

        Fused ("flash") attention may be on or off, and several sequences may share one KV cache or
        have one each. Which is faster depends on the case, so all are tried and the best is kept.
        """
        self._phase, self._rows, self._tokens = phase, batch, context
        caches = (True,) if batch == 1 else (True, False)
        forms = [Form(flash=flash, unified=one) for flash in (True, False) for one in caches]
        trial: dict[Form, float] = {}
        for form in forms:
            self._make_context(form, steps)
            trial[form] = statistics.median(self.round(min(4, steps - 1), 1)["wall_us"])
        best = min(trial, key=lambda form: trial[form])
        if best != forms[-1]:
            self._make_context(best, steps)
        return best.named(batch)

    def round(self, steps: int, warmup: int) -> dict[str, Any]:
        """Decode steps behind the context, or prefills of it, all sequences at once."""
        if self._phase == "decode":
            for row in range(self._rows):
                llama_cpp.llama_memory_seq_rm(self._memory, row, self._tokens, -1)
        return timing.timed(
            lambda _: self._decode(), steps=steps, warmup=warmup, untimed=self._prepare_step
        )

    def close(self) -> None:
        """Free the context and the model."""
        self._free_context()
        if self._model:
            llama_cpp.llama_model_free(self._model)
            self._model = None

    def _prepare_step(self, step: int) -> None:
        if self._phase == "decode":
            rows = [(row, self._tokens + step, 1) for row in range(self._rows)]
        else:
            llama_cpp.llama_memory_clear(self._memory, False)
            rows = [(row, 0, self._tokens) for row in range(self._rows)]
        self._fill_batch(rows)

    def _make_context(self, form: Form, steps: int) -> None:
        self._free_context()
        per_row = -(-(self._tokens + steps) // 256) * 256
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = per_row * self._rows
        parameters.n_seq_max = self._rows
        parameters.n_batch = max(2048, self._rows * self._tokens)
        parameters.n_ubatch = MICRO_BATCH
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.type_k = parameters.type_v = self._kv_type
        parameters.kv_unified = form.unified
        parameters.flash_attn_type = int(form.flash)
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {parameters.n_ctx} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(parameters.n_batch, 0, 1)
        if self._phase == "decode":
            for row in range(self._rows):
                for start in range(0, self._tokens, MICRO_BATCH):
                    self._fill_batch([(row, start, min(MICRO_BATCH, self._tokens - start))])
                    self._decode()

    def _free_context(self) -> None:
        if self._context:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self._context)
            self._context = None

    def _fill_batch(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Random tokens for (sequence, first position, count); logits after each one's last."""
        batch, i = self._batch, 0
        for row, start, count in rows:
            for offset in range(count):
                batch.token[i] = self._random.randrange(100, self._vocab_size)
                batch.pos[i] = start + offset
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = row
                batch.logits[i] = offset == count - 1
                i += 1
        batch.n_tokens = i

    def _decode(self) -> None:
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code != 0:
            raise RuntimeError(f"llama_decode ended with {code}")
        llama_cpp.llama_synchronize(self._context)


def build_features() -> str:
    """The names in llama.cpp's own account of itself that are on: "AVX2 FMA OPENMP ..."."""
    account: str = llama_cpp.llama_print_system_info().decode()
    words = account.replace(":", "|").split("|")
    pairs = [word.split("=") for word in words if "=" in word]
    return " ".join(name.strip() for name, value in pairs if value.strip() != "0")


if __name__ == "__main__":
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    side = LlamaSide()
    handlers: dict[str, Callable[..., Any]] = {
        "convert": convert,
        "open": side.open,
        "prepare": side.prepare,
        "round": side.round,
        "close": side.close,
    }
    worker.serve(handlers)
