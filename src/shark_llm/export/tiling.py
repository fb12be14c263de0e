"""How work is cut."""

from __future__ import annotations


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(d for d in range(limit, 0, -1) if number % d == 0)
