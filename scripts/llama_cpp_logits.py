"""GGUF against llama.cpp's own logits, for every kind of weights that we read.

    python scripts/llama_cpp_logits.py [KIND ...]

needs the Python package llama-cpp-python beside this project's environment, and the model of
scripts/model.py. For each kind, llama.cpp requantizes that model. Our reader then dequantizes the
file, transformers runs the result in f32, and llama.cpp gives two answers to compare with:

    dequantized    the file turned to f32 by llama.cpp itself and run so: tells whether we read the
                   weights as it does. Nothing else differs, and a wrong one would show at once.
    as it runs     the quantized file. llama.cpp rounds activations to 8 bits before each product
                   with a quantized matrix, we do not: tells how far that takes it from the weights.

Prints a row of a Markdown table for each kind, and exits with 1 when a kind is read wrongly.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import model as demo_model
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from shark_llm.checkpoint.export_hf import export_hf
from shark_llm.checkpoint.gguf import GgufCheckpoint

KINDS = {
    "F16": "LLAMA_FTYPE_MOSTLY_F16",
    "BF16": "LLAMA_FTYPE_MOSTLY_BF16",
    "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "Q6_K": "LLAMA_FTYPE_MOSTLY_Q6_K",
    "Q5_K": "LLAMA_FTYPE_MOSTLY_Q5_K_M",
    "Q5_1": "LLAMA_FTYPE_MOSTLY_Q5_1",
    "Q5_0": "LLAMA_FTYPE_MOSTLY_Q5_0",
    "Q4_K": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    "Q4_1": "LLAMA_FTYPE_MOSTLY_Q4_1",
    "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "Q3_K": "LLAMA_FTYPE_MOSTLY_Q3_K_M",
    "Q2_K": "LLAMA_FTYPE_MOSTLY_Q2_K",
}
TOLERANCE = 1e-3
"""Of the largest |logit|: sums in another order. A matrix read wrongly is off by more than 0.1."""
TEXT = (
    "The river ran high that spring. Every morning the old man walked down to the landing to see "
    "whether the ferry had come, and every morning he found only the grey water and the birds. "
    "What is 17 * 23? It is 391, because 17 * 20 is 340 and 17 * 3 is 51."
)


def main() -> None:
    try:
        import llama_cpp  # type: ignore[import-not-found]  # only where somebody put it
    except ImportError as error:
        raise SystemExit(f"this check needs llama-cpp-python: {error}") from None
    kinds = sys.argv[1:] or list(KINDS)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise SystemExit(f"no such kind: {', '.join(unknown)}; choose from {', '.join(KINDS)}")
    demo_model.fetch()
    peer = LlamaCpp(llama_cpp)
    print("| kind | kinds of tensors in the file | dequantized | as it runs | same first choice |")
    print("|---|---|---|---|---|")
    wrong = []
    with tempfile.TemporaryDirectory(dir=demo_model.MODEL.parent) as room:
        for kind in kinds:
            file, plain = Path(room, f"{kind}.gguf"), Path(room, "f32.gguf")
            peer.quantize(demo_model.MODEL, file, KINDS[kind])
            peer.quantize(file, plain, "LLAMA_FTYPE_ALL_F32")
            ids, ours = _ours(file, Path(room, "hf"))
            exact = _difference(ours, peer.logits(plain, ids))
            theirs = peer.logits(file, ids)
            same = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
            print(
                f"| {kind} | {_stored_kinds(file)} | {exact:.1e} | {_difference(ours, theirs):.1e} "
                f"| {same:.0%} |",
                flush=True,
            )
            if exact > TOLERANCE:
                wrong.append(kind)
            file.unlink()
    if wrong:
        raise SystemExit(f"read otherwise than llama.cpp does: {', '.join(wrong)}")


def _difference(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> float:
    """The largest difference of two logits, as a share of the largest |logit|."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def _stored_kinds(file: Path) -> str:
    from gguf import GGUFReader

    tensors = GGUFReader(file).tensors
    found = {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}
    return ", ".join(sorted(found))


def _ours(file: Path, directory: Path) -> tuple[list[int], np.ndarray[Any, Any]]:
    """The prompt's ids, and transformers' logits (S, V) in f32 on the weights as we read them."""
    checkpoint = GgufCheckpoint(file)
    export_hf(checkpoint, directory, dtype=torch.float32)
    ids = Tokenizer.from_str(checkpoint.aux_files["tokenizer.json"].decode()).encode(TEXT).ids
    judge = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = judge(torch.tensor([ids])).logits[0].numpy()
    del judge
    gc.collect()
    return ids, logits


class LlamaCpp:
    """llama.cpp, in this process, on the CPU, with an f32 KV cache."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._silent = library.llama_log_callback(lambda level, text, data: None)
        library.llama_log_set(self._silent, ctypes.c_void_p(0))
        library.llama_backend_init()

    def quantize(self, source: Path, target: Path, kind: str) -> None:
        options = self._library.llama_model_quantize_default_params()
        options.ftype = getattr(self._library, kind)
        options.allow_requantize = True
        with _quiet():
            code = self._library.llama_model_quantize(
                os.fsencode(source), os.fsencode(target), options
            )
        if code:
            raise SystemExit(f"llama.cpp cannot turn {source.name} into {kind}: code {code}")

    def logits(self, file: Path, ids: list[int]) -> np.ndarray[Any, Any]:
        """(S, V): after every token of the prompt."""
        library, count = self._library, len(ids)
        options = library.llama_model_default_params()
        options.use_extra_bufts = False  # no repacked weights: the plain product of each kind
        loaded = library.llama_model_load_from_file(os.fsencode(file), options)
        settings = library.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = 512
        settings.type_k = settings.type_v = library.GGML_TYPE_F32
        settings.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.n_threads = settings.n_threads_batch = 1
        context = library.llama_init_from_model(loaded, settings)
        batch = library.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if code := library.llama_decode(context, batch):
            raise SystemExit(f"llama.cpp cannot run {file.name}: code {code}")
        size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(loaded))
        pointers = [library.llama_get_logits_ith(context, i) for i in range(count)]
        found = np.stack([np.ctypeslib.as_array(pointer, (size,)) for pointer in pointers])
        library.llama_batch_free(batch)
        library.llama_free(context)
        library.llama_model_free(loaded)
        return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The library writes a line for each tensor, past Python, to both outputs."""
    sys.stdout.flush()
    kept = [(fd, os.dup(fd)) for fd in (1, 2)]
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd, _ in kept:
            os.dup2(sink, fd)
        yield
    finally:
        os.close(sink)
        for fd, copy in kept:
            os.dup2(copy, fd)
            os.close(copy)


if __name__ == "__main__":
    main()
