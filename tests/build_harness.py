"""Builds without exporter, compiler and golden check: what is around them is tested, in no time.

    compile_side = FakeCompileSide.install(monkeypatch)
    build(settings(checkpoint, tmp_path / "bundle"), ListReporter())
    assert compile_side.exports == compile_side.compiles == 1

The "MLIR" tells everything the exporter is given, the "module" is the MLIR with the flags: both
depend on just what the real ones depend on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shark_llm import build_work
from shark_llm.artifacts.bundle import Bundle
from shark_llm.artifacts.manifest import GoldenReport
from shark_llm.build import BuildSettings
from shark_llm.compile.compiler import CompileResult
from shark_llm.export import compose
from shark_llm.export.compose import ExportedModule
from shark_llm.export.signatures import ExportSettings, cache_specs, entry_points, softmax_sums
from shark_llm.model.config import ModelConfig
from shark_llm.sharding.plan import plan_ranks
from shark_llm.stages import StageRecord

GOLDEN = GoldenReport(max_abs_error=1e-6, tolerance=1e-3, prompt_tokens=48, decode_steps=4)


def settings(model: Path | str, out_dir: Path, **changes: Any) -> BuildSettings:
    """Small: one entry point a phase, for x86-64-v3 so that no CPU of a test machine matters."""
    fields: dict[str, Any] = {
        "model": str(model),
        "out_dir": out_dir,
        "target": "x86-64-v3",
        "batch_sizes_prefill": (1,),
        "batch_sizes_decode": (1,),
    }
    return BuildSettings(**(fields | changes))


@dataclass
class ListReporter:
    """Keeps what it is told."""

    records: list[StageRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def start(self, stage: str, what: str) -> None:
        self.started.append(stage)

    def progress(self, done: int, total: int) -> None:
        assert 0 <= done <= total

    def finish(self, record: StageRecord) -> None:
        self.records.append(record)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stage_note(self, name: str) -> str:
        """The note of the last stage of that name."""
        return [record.note for record in self.records if record.name == name][-1]


@dataclass
class FakeCompileSide:
    """Counts what is called; `on_compile` runs inside the compiler, and may raise."""

    exports: int = 0
    compiles: int = 0
    goldens: int = 0
    flags: list[tuple[str, ...]] = field(default_factory=list)
    on_compile: Callable[[Path], None] = lambda source: None
    lock: Any = field(default_factory=threading.Lock)

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> FakeCompileSide:
        fake = cls()
        monkeypatch.setattr(compose, "export_module", fake.export_module)
        monkeypatch.setattr(build_work, "run_compiler", fake.run_compiler)
        monkeypatch.setattr(build_work, "run_golden", fake.run_golden)
        monkeypatch.setattr(build_work, "why_not_here", lambda manifest, weight_bytes: None)
        return fake

    def export_module(
        self,
        config: ModelConfig,
        plan: dict[str, Any],
        tp: int,
        settings: ExportSettings,
        attention_form: str,
        linear_form: Any,
    ) -> ExportedModule:
        self.exports += 1
        shape = dataclasses.replace(config, torch_dtype=None, bos_token_id=None, eos_token_ids=())
        return ExportedModule(
            mlir=repr((shape, sorted(plan), tp, settings, attention_form, linear_form)),
            entry_points=entry_points(settings, config.vocab_size),
            softmax_sums=softmax_sums(settings, config.vocab_size),
            caches=cache_specs(config, settings, plan_ranks(config, tp)),
        )

    def run_compiler(self, source: Path, output: Path, flags: Sequence[str]) -> CompileResult:
        with self.lock:
            self.compiles += 1
            self.flags.append(tuple(flags))
        self.on_compile(source)
        for flag in flags:
            if flag.startswith(("--dump-compilation-phases-to=", "--iree-hal-dump-executable-")):
                directory = Path(flag.partition("=")[2])
                directory.mkdir()
                (directory / "a.mlir").write_text("module {}")
        output.write_bytes(hashlib.sha256(source.read_bytes() + repr(flags).encode()).digest())
        return CompileResult(seconds=1.0, peak_memory_bytes=1 << 40)

    def run_golden(self, bundle: Bundle, *args: Any, **kwargs: Any) -> GoldenReport:
        assert bundle.module.is_file()
        assert all(path.is_file() for path in bundle.archives)
        self.goldens += 1
        return GOLDEN
