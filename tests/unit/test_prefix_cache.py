"""The radix tree over pages."""

from __future__ import annotations

from shark_llm.engine.prefix_cache import Node, PrefixCache

A, B, C, D = (0, 1), (2, 3), (4, 5), (6, 7)


def fill(cache: PrefixCache, *chain: tuple[int, int], first_page: int) -> Node:
    """Insert a chain of two-token pages, numbered from `first_page`."""
    tokens = [token for key in chain for token in key]
    pages = list(range(first_page, first_page + len(chain)))
    node, _ = cache.insert(cache.root, tokens, pages)
    return node


def test_match_takes_whole_pages_of_a_common_prefix() -> None:
    cache = PrefixCache(2)
    fill(cache, A, B, first_page=1)
    assert cache.pages(cache.match([*A, *B, *C], 9)) == [1, 2]
    assert cache.pages(cache.match([*A, 2], 9)) == [1]
    assert cache.pages(cache.match([*A, *C], 9)) == [1]
    assert cache.match([*B, *A], 9) is cache.root


def test_match_stops_at_max_pages() -> None:
    """E03: at least one token is left to compute, so the caller limits the match."""
    cache = PrefixCache(2)
    fill(cache, A, B, first_page=1)
    assert cache.pages(cache.match([*A, *B], 1)) == [1]
    assert cache.match([*A, *B], 0) is cache.root


def test_second_page_alone_is_no_hit() -> None:
    """E06: a page counts only behind the same chain of tokens."""
    cache = PrefixCache(2)
    fill(cache, A, C, first_page=1)
    assert cache.match([*B, *C], 9) is cache.root


def test_equal_hashes_of_other_tokens_are_no_hit() -> None:
    """E06: ids are compared as they are; 65 and 321 share their low byte, and here their hash."""

    class Collides(int):
        def __hash__(self) -> int:
            return 7

    cache = PrefixCache(2)
    cache.insert(cache.root, [Collides(65), Collides(66)], [1])
    assert cache.match([Collides(321), Collides(66)], 9) is cache.root
    assert cache.pages(cache.match([Collides(65), Collides(66)], 9)) == [1]


def test_insert_returns_pages_it_has_already() -> None:
    cache = PrefixCache(2)
    fill(cache, A, B, first_page=1)
    node, duplicates = cache.insert(cache.root, [*A, *B, *C], [7, 8, 9])
    assert duplicates == [7, 8]
    assert cache.pages(node) == [1, 2, 9]
    assert cache.num_pages == 3


def test_insert_below_a_node() -> None:
    cache = PrefixCache(2)
    node = fill(cache, A, first_page=1)
    end, duplicates = cache.insert(node, [*B], [2])
    assert duplicates == []
    assert cache.pages(end) == [1, 2]
    assert cache.pages(end, 1) == [2]


def test_evicts_least_recently_used_leaves_first() -> None:
    """E16: LRU among leaves that nobody reads."""
    cache = PrefixCache(2)
    fill(cache, A, B, first_page=1)
    fill(cache, A, C, first_page=5)  # page 5 is a duplicate of page 1; C is 6
    fill(cache, D, first_page=9)
    node = cache.match([*A, *B], 9)
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict(1) == [6]
    assert cache.evict(9) == [9, 2, 1]
    assert cache.num_pages == 0


def test_inner_nodes_go_after_their_leaves() -> None:
    cache = PrefixCache(2)
    fill(cache, A, B, C, first_page=1)
    assert cache.evict(2) == [3, 2]
    assert cache.pages(cache.match([*A, *B, *C], 9)) == [1]


def test_locked_chains_are_never_evicted() -> None:
    cache = PrefixCache(2)
    ab = fill(cache, A, B, first_page=1)
    fill(cache, A, C, first_page=5)
    cache.lock(ab)
    assert cache.num_evictable == 1
    assert cache.evict(9) == [6]
    assert cache.evict(9) == []
    cache.unlock(ab)
    assert cache.num_evictable == 2
    assert cache.evict(9) == [2, 1]


def test_locks_are_counted() -> None:
    cache = PrefixCache(2)
    node = fill(cache, A, first_page=1)
    cache.lock(node)
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict(1) == []
    cache.unlock(node)
    assert cache.evict(1) == [1]


def test_the_heap_of_leaves_does_not_grow_with_use() -> None:
    cache = PrefixCache(2)
    node = fill(cache, A, B, first_page=1)
    for _ in range(5000):
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._leaves) <= 2 * cache.num_pages + 65
    assert cache.evict(9) == [2, 1]
