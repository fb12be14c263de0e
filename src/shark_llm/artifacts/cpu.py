"""Which instruction sets a CPU has, by the names that Linux gives them: what a CPU module needs.

Written into the manifest by the machine that compiles, checked by the one that serves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_CODE_GENERATION = re.compile(r"(avx|fma|f16c|bmi|amx|sse4|vaes|gfni|vpclmul)\w*")


def host_cpu_features() -> frozenset[str]:
    """The x86 instruction sets of this machine that code generation uses; empty on other CPUs."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    words = flags[1].split() if flags else []
    return frozenset(word for word in words if _CODE_GENERATION.fullmatch(word))


def missing_cpu_features(required: Iterable[str]) -> tuple[str, ...]:
    """Those of `required` that this machine lacks."""
    return tuple(sorted(set(required) - host_cpu_features()))
