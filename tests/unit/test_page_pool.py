"""The free pages."""

from __future__ import annotations

import pytest

from shark_llm.engine.page_pool import PagePool


def test_page_zero_is_never_handed_out() -> None:
    pool = PagePool(8)
    assert pool.total == pool.num_free == 7
    assert sorted(pool.allocate(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_free == 0


def test_pages_come_back() -> None:
    pool = PagePool(5)
    pages = pool.allocate(4)
    pool.free(pages[1:3])
    assert sorted(pool.free_pages()) == sorted(pages[1:3])
    assert sorted(pool.allocate(2)) == sorted(pages[1:3])
    assert pool.breaches == []


def test_allocating_nothing_takes_nothing() -> None:
    pool = PagePool(3)
    assert pool.allocate(0) == []
    assert pool.num_free == 2


def test_asking_for_more_than_there_is_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="3 pages asked for, 2 free"):
        PagePool(3).allocate(3)


def test_page_freed_twice_is_reported_and_not_taken_back() -> None:
    """E08: a page freed twice must not get two owners."""
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    pool.free(pages[:1])
    assert pool.breaches == [f"page {pages[0]} was returned but nobody had it"]
    assert len(set(pool.free_pages())) == len(pool.free_pages()) == 3


@pytest.mark.parametrize("page", [0, -1, 4])
def test_foreign_pages_are_reported(page: int) -> None:
    pool = PagePool(4)
    pool.free([page])
    assert len(pool.breaches) == 1
    assert pool.num_free == 3
