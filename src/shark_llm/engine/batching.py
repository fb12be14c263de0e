"""How the rows of a step are dealt out over forwards of compiled batch sizes.

Decode is bound by reading the weights, so it makes as few forwards as it can: full batches of the
largest size, then the rest in one, padded to the next size.

Prefill is bound by arithmetic, which padding wastes: a forward computes (compiled size) x (longest
row, in whole pages) positions. Rows are sorted by length and cut into consecutive groups so that
the sum of computed positions is least, counting each forward as `FORWARD_OVERHEAD` positions more.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from shark_llm.engine.scheduler import ScheduledRow

FORWARD_OVERHEAD = 32
"""A forward of few positions costs about as much as this many more, to read the weights once."""


def decode_groups(
    rows: Sequence[ScheduledRow], batch_sizes: Sequence[int]
) -> list[list[ScheduledRow]]:
    """Split rows into groups of at most the largest of the (ascending) compiled sizes."""
    most = batch_sizes[-1]
    return [list(rows[i : i + most]) for i in range(0, len(rows), most)]


def prefill_groups(
    rows: Sequence[ScheduledRow], batch_sizes: Sequence[int], page_size: int
) -> list[list[ScheduledRow]]:
    """Split rows into groups of similar length, with the least padding and overhead."""
    if len(rows) < 2:
        return [list(rows)] if rows else []
    ordered = sorted(rows, key=lambda row: row.start - row.end)  # longest first, else as given
    lengths = [-(-(row.end - row.start) // page_size) * page_size for row in ordered]
    # best[i]: least cost of the first i rows, and where the last of their groups begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(ordered) + 1):
        choices = []
        for begin in range(max(0, end - batch_sizes[-1]), end):
            size = batch_sizes[bisect.bisect_left(batch_sizes, end - begin)]
            cost = size * lengths[begin] + FORWARD_OVERHEAD
            choices.append((best[begin][0] + cost, begin))
        best.append(min(choices))
    groups: list[list[ScheduledRow]] = []
    end = len(ordered)
    while end:
        begin = best[end][1]
        groups.append(ordered[begin:end])
        end = begin
    groups.reverse()
    return groups
