"""The prefix cache against a plain dictionary from token chains to pages."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shark_llm.engine.prefix_cache import Node, PrefixCache

SIZE = 2
Chain = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 2), max_size=12)


class PrefixCacheMachine(RuleBasedStateMachine):
    """`model` maps each cached chain (whole pages from the start) to its page; `locks` counts."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(SIZE)
        self.model: dict[Chain, int] = {}
        self.last_used: dict[Chain, int] = {}
        self.locked: list[tuple[Chain, Node]] = []
        self.next_page = 1
        self.clock = 0

    def chains(self, tokens: Chain) -> list[Chain]:
        """Every whole-page beginning of `tokens`."""
        return [tokens[:end] for end in range(SIZE, len(tokens) + 1, SIZE)]

    def touch(self, tokens: Chain) -> None:
        self.clock += 1
        for chain in self.chains(tokens):
            self.last_used[chain] = self.clock

    def matched(self, tokens: Chain) -> Chain:
        best: Chain = ()
        for chain in self.chains(tokens):
            if chain not in self.model:
                break
            best = chain
        return best

    def protected(self) -> set[Chain]:
        return {chain for tokens, _ in self.locked for chain in self.chains(tokens)}

    @rule(tokens=TOKENS)
    def insert(self, tokens: list[int]) -> None:
        chains = self.chains(tuple(tokens))
        pages = list(range(self.next_page, self.next_page + len(chains)))
        self.next_page += len(chains)
        node, duplicates = self.cache.insert(self.cache.root, tokens[: len(chains) * SIZE], pages)
        for chain, page in zip(chains, pages, strict=True):
            assert (page in duplicates) == (chain in self.model)
            self.model.setdefault(chain, page)
        assert self.cache.pages(node) == [self.model[chain] for chain in chains]
        self.touch(tuple(tokens))

    @rule(tokens=TOKENS, most=st.integers(0, 7))
    def match(self, tokens: list[int], most: int) -> None:
        node = self.cache.match(tokens, most)
        chain = self.matched(tuple(tokens[: most * SIZE]))
        assert self.cache.pages(node) == [self.model[c] for c in self.chains(chain)]

    @rule(tokens=TOKENS)
    def lock(self, tokens: list[int]) -> None:
        node = self.cache.match(tokens, 99)
        chain = self.matched(tuple(tokens))
        self.cache.lock(node)
        self.locked.append((chain, node))
        self.touch(chain)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.locked) - 1))
        chain, node = self.locked.pop(index)
        self.cache.unlock(node)
        self.touch(chain)

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        """One by one the longest unused leaf that no lock protects."""
        evicted = self.cache.evict(count)
        assert len(evicted) == min(count, len(set(self.model) - self.protected()))
        for page in evicted:
            inner = {chain[:-SIZE] for chain in self.model}
            leaves = set(self.model) - inner - self.protected()
            (chain,) = [c for c, p in self.model.items() if p == page]
            assert chain in leaves
            assert self.last_used[chain] == min(self.last_used[leaf] for leaf in leaves)
            del self.model[chain]

    @invariant()
    def counts_agree(self) -> None:
        assert self.cache.num_pages == len(self.model)
        assert self.cache.num_evictable == len(set(self.model) - self.protected())
        assert {node.page for node in self.cache.nodes()} == set(self.model.values())
        assert all(node.lock_count >= 0 for node in self.cache.nodes())


PrefixCacheMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestPrefixCache = PrefixCacheMachine.TestCase
