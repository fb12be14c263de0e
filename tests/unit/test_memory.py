"""How much memory a default KV cache may count on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bundles import sample_manifest
from shark_llm.artifacts.manifest import CacheSpec, EntryPoint, FileInfo, Manifest, Target
from shark_llm.errors import CapacityError
from shark_llm.runtime import module
from shark_llm.runtime.memory import available_bytes

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {40 << 20} kB\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def available(tmp_path: Path, membership: str, groups: dict[str, str]) -> float:
    """In GiB."""
    write(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": membership})
    write(tmp_path / "cgroup", groups)
    return available_bytes(proc=tmp_path / "proc", cgroups=tmp_path / "cgroup") / GIB


def test_page_cache_is_available(tmp_path: Path) -> None:
    """What was taken for free memory leaves it out: after a build hardly anything was free."""
    assert available(tmp_path, "0::/\n", {}) == 40


@pytest.mark.parametrize(
    ("membership", "groups", "expected"),
    [
        (
            "0::/pod/box\n",
            {
                "pod/box/memory.max": str(8 * GIB),
                "pod/box/memory.current": str(3 * GIB),
                "pod/box/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
                "pod/memory.max": "max",
                "pod/memory.current": str(5 * GIB),
            },
            6,
        ),
        (
            "0::/pod/box\n",
            {
                "pod/box/memory.max": "max",
                "pod/memory.max": str(4 * GIB),
                "pod/memory.current": str(3 * GIB),
            },
            1,
        ),
        (
            "0::/of/the/host\n",  # in a container without a namespace of its own for control groups
            {"memory.max": str(2 * GIB), "memory.current": str(GIB)},
            1,
        ),
        (
            "5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n",
            {
                "memory/box/memory.limit_in_bytes": str(2 * GIB),
                "memory/box/memory.usage_in_bytes": str(GIB),
                "memory/box/memory.stat": f"total_inactive_file {GIB // 2}\n",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": str(30 * GIB),
            },
            1.5,
        ),
        ("0::/\n", {"memory.max": str(GIB), "memory.current": str(2 * GIB)}, 0),
    ],
)
def test_limits_of_control_groups_count(
    tmp_path: Path, membership: str, groups: dict[str, str], expected: float
) -> None:
    """A container of 8 GiB on a machine of 64 was given a cache for the machine, and was killed."""
    assert available(tmp_path, membership, groups) == expected


def test_here() -> None:
    assert 0 < available_bytes() < 1 << 50


def manifest(
    tp: int, sizes: dict[str, int], heads: tuple[int, ...], memory: int | None
) -> Manifest:
    """One cache, f32, pages of 16 tokens, heads of 16 values: 1024 bytes a page and head."""
    found = sample_manifest(tp=tp)
    caches = tuple(
        CacheSpec(name=f"c{rank}", dtype="f32", shape=("pages", 16, count, 16), rank=rank)
        for rank, count in enumerate(heads)
    )
    target = Target(name="t", driver="hip", flags=(), memory_bytes=memory)
    decode = EntryPoint(name="decode_bs4", phase="decode", batch_size=4, inputs=(), results=())
    files = {name: FileInfo(size=size, sha256="0" * 64) for name, size in sizes.items()}
    return found.model_copy(
        update={
            "archives": tuple(sizes),
            "entry_points": (decode,),
            "files": files,
            "caches": caches,
            "target": target,
            "page_size": 16,
            "max_model_len": 10**6,
        }
    )


def num_pages(found: Manifest) -> int:
    return module._num_pages(found, None, found.max_model_len)


def test_default_cache_takes_half_of_what_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 10_000 + 1024 * 200)
    cpu = manifest(1, {"model.irpa": 10_000}, (1,), None)
    assert num_pages(cpu) == 1 + 100
    few = cpu.model_copy(update={"max_model_len": 100})
    assert num_pages(few) == 1 + 4 * 7  # enough for the largest batch, whole pages each
    monkeypatch.setattr(module, "available_bytes", lambda: 9_000)
    with pytest.raises(CapacityError, match="no memory for a KV cache"):
        num_pages(cpu)


def test_default_cache_fits_the_fullest_device() -> None:
    """Every device holds the shared archive and its own; the one with most heads has least room."""
    sizes = {"model.irpa": 1000, "model.rank0.irpa": 2000, "model.rank1.irpa": 1000}
    found = manifest(2, sizes, (2, 1), 3000 + 2048 * 200)
    assert num_pages(found) == 1 + 100
