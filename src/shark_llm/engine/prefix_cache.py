"""Radix tree over whole pages: which keys and values are already in the KV cache.

The alphabet of the tree is the page: an edge is the token ids of one page, compared as they are (a
hash only finds the bucket), and a node stands for the whole chain of tokens from the root down to
it.

    operation   changes                         owner of the pages
    match       nothing                         cache
    insert      adds nodes below a node         from the caller to the cache, duplicates stay his
    lock        pins a chain, marks it used     cache
    unlock      unpins it                       cache
    evict       removes unpinned leaves, LRU    from the cache to the caller

Time is a counter that lock, unlock and insert advance, so the order of eviction is reproducible.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence


class Node:
    """One cached page. `lock_count` counts the locks on this node and on all nodes below it."""

    __slots__ = ("children", "depth", "key", "last_used", "lock_count", "page", "parent")

    def __init__(self, key: tuple[int, ...], page: int, parent: Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.lock_count = 0
        self.last_used = 0


class PrefixCache:
    """Token chains in whole pages of `page_size` tokens. Knows no requests and no pool."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node((), 0, None)
        self.num_pages = 0
        self.version = 0
        """Changes whenever a match could give another answer."""
        self._num_locked = 0
        self._clock = 0
        self._sequence = 0
        # A heap of (last_used, number, leaf) of evictable leaves, with stale entries among them.
        self._leaves: list[tuple[int, int, Node]] = []

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could give up."""
        return self.num_pages - self._num_locked

    def match(self, tokens: Sequence[int], max_pages: int) -> Node:
        """The deepest node that is a prefix of `tokens`, at most `max_pages` deep."""
        node = self.root
        size = self.page_size
        for begin in range(0, min(max_pages, len(tokens) // size) * size, size):
            child = node.children.get(tuple(tokens[begin : begin + size]))
            if child is None:
                break
            node = child
        return node

    def pages(self, node: Node, first: int = 0) -> list[int]:
        """The pages of the chain that ends in `node`, from the `first`-th on, in order."""
        pages = []
        step: Node | None = node
        while step is not None and step.depth > first:
            pages.append(step.page)
            step = step.parent
        pages.reverse()
        return pages

    def insert(
        self, node: Node, tokens: Sequence[int], pages: Sequence[int]
    ) -> tuple[Node, list[int]]:
        """Add whole pages of tokens below `node`; `pages[i]` holds the i-th page of `tokens`.

        Returns the last node of the chain, and those pages of the caller that the cache did not
        take because it has the same tokens already.
        """
        size = self.page_size
        assert len(tokens) == len(pages) * size
        self._clock += 1
        duplicates = []
        for i, page in enumerate(pages):
            key = tuple(tokens[i * size : (i + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = Node(key, page, node)
                node.children[key] = child
                self.num_pages += 1
                self.version += 1
            elif child.page != page:
                duplicates.append(page)
            child.last_used = self._clock
            node = child
        self._offer(node)
        return node, duplicates

    def lock(self, node: Node) -> None:
        """Pin the chain that ends in `node`: none of its pages is evicted until as many unlocks."""
        self._clock += 1
        step = node
        while step.parent is not None:
            if step.lock_count == 0:
                self._num_locked += 1
            step.lock_count += 1
            step.last_used = self._clock
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the same node."""
        self._clock += 1
        step = node
        while step.parent is not None:
            assert step.lock_count > 0, "unlock without lock"
            step.lock_count -= 1
            if step.lock_count == 0:
                self._num_locked -= 1
            step.last_used = self._clock
            step = step.parent
        self._offer(node)

    def evict(self, count: int) -> list[int]:
        """Give up to `count` pages back: unpinned leaves, the longest unused first."""
        pages: list[int] = []
        while len(pages) < count and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            if node.last_used != last_used or node.children or node.lock_count:
                continue  # stale: used, extended or pinned since
            parent = node.parent
            if parent is None or parent.children.get(node.key) is not node:
                continue  # stale: evicted through an equal entry
            del parent.children[node.key]
            self.num_pages -= 1
            self.version += 1
            pages.append(node.page)
            self._offer(parent)
        return pages

    def nodes(self) -> Iterator[Node]:
        """Every node but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _offer(self, node: Node) -> None:
        """Enter a node among the evictable leaves if it is one."""
        if node.children or node.lock_count or node.parent is None:
            return
        if len(self._leaves) > 2 * self.num_pages + 64:  # mostly stale entries: start afresh
            leaves = [n for n in self.nodes() if not (n.children or n.lock_count or n is node)]
            self._leaves = [(n.last_used, i, n) for i, n in enumerate(leaves)]
            heapq.heapify(self._leaves)
            self._sequence = max(self._sequence, len(leaves))
        self._sequence += 1
        heapq.heappush(self._leaves, (node.last_used, self._sequence, node))
