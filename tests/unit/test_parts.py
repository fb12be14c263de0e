"""A bundle taken apart: its files under any name, in any order, and nothing of another bundle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundles import T0, sample_manifest
from shark_llm.artifacts.bundle import check_digests
from shark_llm.artifacts.irpa import Identity
from shark_llm.artifacts.parts import Parts, open_parts
from shark_llm.artifacts.publish import publish
from shark_llm.errors import ArtifactError, VersionMismatchError
from shark_llm.sharding.archives import write_dummy_archives
from shark_llm.sharding.plan import plan_parameters

SMALL = {
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
}


def make_bundle(path: Path, *, digest: str = "a" * 64, module: bytes = b"vmfb") -> Path:
    """tp 2, with a tokenizer."""
    with publish(path) as staging:
        write_dummy_archives(
            T0,
            plan_parameters(T0, 2),
            identity=Identity(model=digest, tp=2, rank=None, dtype="f32"),
            out_dir=staging.path,
        )
        for name, content in {**SMALL, "model.vmfb": module}.items():
            (staging.path / name).write_bytes(content)
        staging.seal(sample_manifest(tp=2, digest=digest))
    return path


class Pieces:
    """A bundle taken apart: big files under other names in a directory each."""

    def __init__(self, root: Path) -> None:
        self.bundle = make_bundle(root / "bundle")
        self.tokenizer = root / "tokenizer" / "tokenizer.json"
        self.tokenizer.parent.mkdir()
        for name in SMALL.keys() - {"config.json"}:
            shutil.copy(self.bundle / name, self.tokenizer.parent / name)
        self.config = Path(shutil.copy(self.bundle / "manifest.json", root / "served.json"))
        self.vmfb = Path(shutil.copy(self.bundle / "model.vmfb", root / "llama.vmfb"))
        names = ("model.rank1.irpa", "model.irpa", "model.rank0.irpa")
        self.parameters = [
            Path(shutil.copy(self.bundle / name, root / f"{i}.irpa"))
            for i, name in enumerate(names)
        ]

    def open(self, **changes: Any) -> Parts:
        fields = {
            "tokenizer_json": self.tokenizer,
            "model_config": self.config,
            "vmfb": self.vmfb,
            "parameters": self.parameters,
            "runtime_version": "3.13.0",
        }
        return open_parts(**(fields | changes))


@pytest.fixture
def pieces(tmp_path: Path) -> Pieces:
    return Pieces(tmp_path)


def test_each_archive_says_itself_which_it_is(pieces: Pieces) -> None:
    parts = pieces.open()
    one, shared, zero = pieces.parameters
    assert parts.archives == (shared, zero, one)
    assert parts.module == pieces.vmfb
    assert parts.path == pieces.tokenizer.parent
    assert "config.json" not in parts.manifest.files
    check_digests(parts)


def test_digests_are_checked_where_the_files_are(pieces: Pieces) -> None:
    pieces.vmfb.write_bytes(b"vmfB")
    with pytest.raises(ArtifactError, match=r"damaged: model\.vmfb has sha256"):
        check_digests(pieces.open())


def test_the_bundle_itself_may_be_named_by_its_parts(pieces: Pieces) -> None:
    inside = pieces.bundle
    parts = pieces.open(
        tokenizer_json=inside / "tokenizer.json",
        model_config=inside / "manifest.json",
        vmfb=inside / "model.vmfb",
        parameters=[inside / f"model{part}.irpa" for part in ("", ".rank0", ".rank1")],
    )
    assert parts.module == inside / "model.vmfb"


def _other_tokenizer(pieces: Pieces) -> None:
    pieces.tokenizer.write_bytes(b'{"model": []}')


def _no_template(pieces: Pieces) -> None:
    (pieces.tokenizer.parent / "chat_template.jinja").unlink()


def _cut(pieces: Pieces) -> None:
    pieces.vmfb.write_bytes(b"v")


def _other_model(pieces: Pieces) -> None:
    """F09: equal names and shapes, other weights."""
    other = make_bundle(pieces.bundle.with_name("other"), digest="c" * 64)
    shutil.copy(other / "model.rank1.irpa", pieces.parameters[0])


def _hf_config(pieces: Pieces) -> None:
    pieces.config.write_bytes(SMALL["config.json"])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_other_tokenizer, "tokenizer.json differs from what the manifest lists"),
        (_no_template, "lacks chat_template.jinja, which the manifest lists"),
        (_cut, "llama.vmfb has 1 bytes, model.vmfb of this manifest has 4"),
        (_other_model, "0.irpa belongs elsewhere"),
        (_hf_config, "is the config.json of a checkpoint"),
        (lambda pieces: pieces.config.unlink(), "served.json"),
        (lambda pieces: pieces.vmfb.unlink(), "llama.vmfb (No such file or directory)"),
        (lambda pieces: pieces.parameters.pop(), "--parameters lacks model.rank0.irpa: tp 2 needs"),
        (lambda pieces: pieces.parameters.append(pieces.parameters[1]), "give each file once"),
        (lambda pieces: pieces.parameters[0].write_bytes(b""), "0 bytes are too few"),
    ],
)
def test_what_does_not_belong_is_refused_by_name(
    pieces: Pieces, spoil: Callable[[Pieces], object], words: str
) -> None:
    """F09."""
    spoil(pieces)
    with pytest.raises(ArtifactError) as caught:
        pieces.open()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_by_another_name(pieces: Pieces) -> None:
    renamed = pieces.tokenizer.rename(pieces.tokenizer.with_name("llama_tokenizer.json"))
    with pytest.raises(ArtifactError, match=r"must be called tokenizer\.json"):
        pieces.open(tokenizer_json=renamed)


def test_another_runtime(pieces: Pieces) -> None:
    """F07."""
    fields = json.loads(pieces.config.read_text())
    fields["versions"]["iree-base-compiler"] = "3.9.0"
    pieces.config.write_text(json.dumps(fields))
    with pytest.raises(VersionMismatchError, match=r"3\.9\.0"):
        pieces.open()
