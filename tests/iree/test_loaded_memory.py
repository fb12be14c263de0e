"""What a loaded bundle holds in memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shark_llm.runtime.devices import DeviceConfig
from shark_llm.runtime.module import load_runner
from shark_llm.runtime.runner import Row


def resident_kib(path: Path) -> list[int]:
    """Of each mapping of the file in this process."""
    mappings = re.findall(
        r"^[0-9a-f]+-[0-9a-f]+ .* (\S+)\n(?:\w+: .*\n)*?Rss: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE,
    )
    return [int(rss) for name, rss in mappings if name == str(path)]


def test_weights_are_not_in_memory_twice(compiled: Callable[[str], Any]) -> None:
    """What the module packed when it was loaded leaves nothing of the archives in memory, though
    they stay mapped: what a step reads of them comes back."""
    bundle = compiled("t0").bundle
    runner = load_runner(bundle, DeviceConfig(driver="local-sync"), 64)
    try:
        for archive in bundle.archives:
            held = resident_kib(archive)
            assert held
            assert sum(held) == 0
        step = runner.run("decode", [Row(tokens=[5], start=0, pages=[1])])
        assert 0 <= step.best_tokens[0] < runner.vocab_size
    finally:
        runner.close()
