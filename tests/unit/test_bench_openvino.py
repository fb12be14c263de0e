"""OpenVINO's side of the benchmarks, over a pipeline that is made up: its loop, and its forms."""

from __future__ import annotations

import importlib
import json
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmark_samples import openvino_peer

VOCAB_SIZE = 300


class Handle:
    """A request of the made-up pipeline: its prompt takes one step, each token another."""

    def __init__(self, max_tokens: int) -> None:
        self.left, self.unread, self.is_new = max_tokens, 0, True

    def can_read(self) -> bool:
        return self.unread > 0

    def read(self) -> dict[int, Any]:
        count, self.unread = self.unread, 0
        return {0: SimpleNamespace(generated_ids=[1] * count)}

    def get_status(self) -> str:
        return "running" if self.left else "finished"


class Pipeline:
    """Every step brings one token to each request that has not ended."""

    made: ClassVar[list[Pipeline]] = []

    def __init__(self, model: str, *, properties: dict[str, Any], **_: Any) -> None:
        if properties["KV_CACHE_PRECISION"] == "bf16":
            raise RuntimeError("expect kvcache type f32, current: bf16")
        self.properties = properties
        self.requests: list[weakref.ref[Handle]] = []
        self.most = self.prefills = 0
        Pipeline.made.append(self)

    def add_request(self, number: int, ids: Any, config: Any) -> Handle:
        handle = Handle(config.max_new_tokens)
        self.requests.append(weakref.ref(handle))
        return handle

    def step(self) -> None:
        live = [handle for handle in self.handles() if handle.left]
        self.most = max(self.most, len(live))
        for handle in live:
            self.prefills += handle.is_new
            handle.is_new = False
            handle.left -= 1
            handle.unread += 1

    def has_non_finished_requests(self) -> bool:
        return any(handle.left for handle in self.handles())

    def handles(self) -> list[Handle]:
        """As in the real one, a request whose handle is gone is gone."""
        return [handle for request in self.requests if (handle := request())]


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An OpenVinoSide whose packages are made up."""
    genai = ModuleType("openvino_genai")
    names = {
        "__version__": "1.2",
        "ContinuousBatchingPipeline": Pipeline,
        "GenerationConfig": SimpleNamespace,
        "GenerationStatus": SimpleNamespace(RUNNING="running"),
        "SchedulerConfig": SimpleNamespace,
    }
    for name, value in names.items():
        setattr(genai, name, value)
    openvino = ModuleType("openvino")
    monkeypatch.setattr(openvino, "Tensor", lambda array: array, raising=False)
    monkeypatch.setitem(sys.modules, "openvino", openvino)
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.delitem(sys.modules, "benchmarks.openvino_worker", raising=False)
    Pipeline.made.clear()
    return importlib.import_module("benchmarks.openvino_worker").OpenVinoSide()


def opened(side: Any, directory: Path, dtype: str) -> dict[str, str]:
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    found: dict[str, str] = side.open(
        model=str(directory), threads=3, forms=openvino_peer.FORMS[dtype], kv_cache_tokens=4096
    )
    return found


def test_forms_that_the_cpu_lacks_are_left_out(side: Any, tmp_path: Path) -> None:
    """Without instructions for bf16, its attention refuses a KV cache of them when it is loaded."""
    assert opened(side, tmp_path, "bf16") == {
        "version": "1.2",
        "form": "computes in f32, KV cache in f32",
    }
    assert Pipeline.made[-1].properties["INFERENCE_NUM_THREADS"] == 3


def test_no_form_at_all_is_told(side: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    with pytest.raises(RuntimeError, match="it takes none of the forms"):
        side.open(model=str(tmp_path), threads=1, forms=[("f32", "bf16")], kv_cache_tokens=64)


def test_a_load_keeps_so_many_streams_busy(side: Any, tmp_path: Path) -> None:
    opened(side, tmp_path, "f32")
    found = side.load(prompts=[[1, 2, 3]] * 7, concurrency=3, max_tokens=5)
    assert Pipeline.made[-1].most == 3
    assert len(found["answers"]) == 7
    for answer in found["answers"]:
        assert answer["output_tokens"] == len(answer["events"]) == 5
        assert 0 <= answer["sent"] < answer["events"][0] <= answer["events"][-1] <= found["wall_s"]


def test_steps_are_those_of_all_rows(side: Any, tmp_path: Path) -> None:
    opened(side, tmp_path, "f32")
    side.prepare(phase="decode", batch=4, context=32, steps=5)
    assert len(side.round(steps=3, warmup=2)["wall_us"]) == 3
    assert not Pipeline.made[-1].has_non_finished_requests(), "nothing is left to the next round"
    assert Pipeline.made[-1].most == 4
    side.prepare(phase="prefill", batch=2, context=32, steps=5)
    assert len(side.round(steps=2, warmup=1)["wall_us"]) == 2
    assert Pipeline.made[-1].prefills == 4 + 2 * 3, "none was dropped before its step"
