"""Which pages of the KV cache are free, and nothing else.

    who owns page p (1 <= p < num_pages)     where it is written down
    free                                     PagePool
    cached: keys of tokens in the tree       PrefixCache (one node per page)
    held: by one running request alone       RequestState.pages[num_shared_pages:]

Page 0 is scratch for unused batch rows: it is never handed out.
"""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """The free pages of a pool of `num_pages` pages, page 0 included."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: recently used pages are warm
        self._is_free = bytearray(num_pages)
        self._is_free[1:] = b"\x01" * (num_pages - 1)
        self.breaches: list[str] = []
        """Pages returned twice or out of nowhere. Such a page is not taken back: a lost page only
        costs memory, a page with two owners mixes two users' text."""

    @property
    def total(self) -> int:
        """Pages that can be handed out."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_pages(self) -> list[int]:
        """The free pages, for the integrity check."""
        return list(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages. The caller has made sure that there are so many."""
        assert 0 <= count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back from their only owner."""
        for page in reversed(pages):
            if not 0 < page < self.num_pages or self._is_free[page]:
                self.breaches.append(f"page {page} was returned but nobody had it")
                continue
            self._is_free[page] = 1
            self._free.append(page)
