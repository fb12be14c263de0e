"""Compiled tiny bundles, built once per run of the tests, whichever worker asks first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from compiled import built_bundle, running, session_directory
from ladder import KINDS, Judge
from shark_llm.artifacts.bundle import Bundle
from shark_llm.compile import targets
from shark_llm.runtime.module import IreeRunner
from shark_llm.sharding.apply import TORCH_DTYPES
from shark_llm.sharding.quantize import dequantize, quantize
from tiny import tiny_config, tiny_weights, write_tiny

WIDE_HEADS_BIASES_YARN = {
    "hidden_size": 160,  # A05: 160 / 4 is 40
    "head_dim": 64,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "rope_scaling": KINDS["yarn"]["rope_scaling"],
}

# name -> config.json, dtype of the files, settings of the build
BUNDLES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "t0": (
        tiny_config(rope_scaling=KINDS["llama3"]["rope_scaling"]),
        "f32",
        {"batch_sizes_prefill": (1, 4), "batch_sizes_decode": (1, 4)},
    ),
    "wide": (
        tiny_config(**WIDE_HEADS_BIASES_YARN),
        "bf16",
        {"batch_sizes_prefill": (3,), "batch_sizes_decode": (3,)},
    ),
    "tp2": (
        KINDS["nine_three"],  # 3 kv heads: two on rank 0, one on rank 1
        "f32",
        {"tp": 2, "batch_sizes_prefill": (2,), "batch_sizes_decode": (2,)},
    ),
    "tp3": (
        tiny_config(attention_bias=True, mlp_bias=True, vocab_size=251),
        "f32",  # 2 kv heads: the first is on two ranks; biases of o and down on rank 0 only
        {"tp": 3, "batch_sizes_prefill": (2,), "batch_sizes_decode": (2,)},
    ),
    "tp8": (  # one rank has two query heads, the others one; a kv head is on up to three ranks
        KINDS["nine_three"] | {"num_hidden_layers": 1},
        "f32",
        {"tp": 8, "batch_sizes_prefill": (2,), "batch_sizes_decode": (2,)},
    ),
    "int8": (
        tiny_config(**WIDE_HEADS_BIASES_YARN),
        "bf16",
        {
            "weights_dtype": "int8",
            "batch_sizes_prefill": (1, 3),
            "batch_sizes_decode": (1, 3),
        },
    ),
    "int8_tp3": (  # 251 vocab rows do not fill a rank's tiles
        tiny_config(attention_bias=True, mlp_bias=True, vocab_size=251),
        "f32",
        {
            "weights_dtype": "int8",
            "tp": 3,
            "batch_sizes_prefill": (2,),
            "batch_sizes_decode": (2,),
        },
    ),
    "shared": (  # chunks of 4, 4 and 1 layers, as for GPUs: the first two are one function
        tiny_config(num_hidden_layers=9),
        "f32",
        {"tp": 3, "batch_sizes_prefill": (2,), "batch_sizes_decode": (2,)},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A published bundle, its dev artifacts, its checkpoint, and transformers on that, or on its
    weights as they are once quantized."""

    bundle: Bundle
    dev: Path
    checkpoint: Path
    judge: Judge


CompiledModel = Callable[[str], Compiled]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CompiledModel:
    """The bundle of a name in BUNDLES."""
    root = session_directory(tmp_path_factory)

    @cache
    def make(name: str) -> Compiled:
        config, dtype, settings = BUNDLES[name]
        checkpoint = tmp_path_factory.mktemp(name)
        weights = tiny_weights(config, dtype=TORCH_DTYPES[dtype])
        write_tiny(checkpoint, config=config, weights=weights)
        judged = checkpoint
        if "weights_dtype" in settings:
            weights = {
                name: dequantize(*quantize(weight)) if weight.ndim == 2 else weight.float()
                for name, weight in weights.items()
            }
            judged = tmp_path_factory.mktemp(f"{name}_dequantized")
            write_tiny(judged, config=config, weights=weights)
        with pytest.MonkeyPatch.context() as patch:
            if name == "shared":
                row = replace(targets.host_target(), linear_form=targets.PLAIN_SHARED)
                patch.setattr(targets, "host_target", lambda **_: row)
            bundle, dev = built_bundle(root, name, checkpoint, dtype=dtype, **settings)
        return Compiled(bundle=bundle, dev=dev, checkpoint=checkpoint, judge=Judge(judged))

    return make


@pytest.fixture
def runner(request: pytest.FixtureRequest, compiled: CompiledModel) -> Iterator[IreeRunner]:
    """The bundle named by the test's parameter, loaded, its pool poisoned with NaN."""
    with running(compiled(request.param).bundle) as runner:
        runner.poison()
        yield runner


@pytest.fixture(autouse=True, scope="session")
def _quiet_tracing() -> Iterator[None]:
    """torch logs every symbol it makes, which would bury a failure's own output."""
    trace = logging.getLogger("torch.__trace")
    trace.propagate = False
    yield
    trace.propagate = True
