"""Which rows run in the next step.

    plan   1. running requests that decode, oldest first, take one token of the budget each;
              a missing page is taken from the pool, then from the prefix cache, then from the
              youngest running request, which is preempted and computed again later
           2. running requests in prefill, oldest first, take chunks that end on a page boundary
           3. waiting requests are admitted while rows, budget and pages for their whole prompt last
    computed / finish   what became of the rows

Who waits how long. Owners (API keys) take turns, and a request whose turn it is but that does not
fit yet blocks the rest. Among the requests of one owner, fcfs admits in order of arrival, and lpm
the longest cached prefix first. In both, a request whose next page is just being computed for
another one steps aside until that is done. However:

    of its own owner    at most `max_overtakes` later arrivals are admitted before a waiting request
    of other owners     at most one each, between two admissions of an owner that has some waiting;
                        while a request steps aside, at most `max_overtakes` others
    preempted ones      come before all others

So a big request cannot starve behind small ones, nor small ones behind a stream of big ones, nor
an owner behind one that sends more: a request waits for those of its owner before it, for
`max_overtakes` others, each time for one request of every other owner, and for nobody else.

No clock, no threads, no device in here.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shark_llm.engine.fairness import Turns
from shark_llm.engine.page_pool import PagePool
from shark_llm.engine.prefix_cache import Node, PrefixCache
from shark_llm.engine.settings import EngineSettings
from shark_llm.engine.state import RequestState

LPM_WINDOW = 128
"""lpm looks at so many requests from the heads of the owners' queues together, and at
`LEAST_LPM_WINDOW` of each; a match costs microseconds per page."""
LEAST_LPM_WINDOW = 8


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """Positions start .. end - 1 of a request run in this step."""

    state: RequestState
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """The logits after this row give the next token."""
        return self.end == len(self.state.tokens)

    @property
    def is_scored(self) -> bool:
        """The logits after this row say how likely a token of the prompt was."""
        return not self.is_last and self.state.is_scoring and self.end > self.state.last_wanted

    @property
    def needs_logits(self) -> bool:
        """More than the best token is asked of this row."""
        return self.is_scored or (self.is_last and not self.state.sampler.takes_best)

    @property
    def needs_logprobs(self) -> bool:
        """How likely a token was is asked of this row."""
        asked = self.is_last and self.state.request.sampling.logprobs is not None
        return self.is_scored or asked

    @property
    def inverse_temperature(self) -> float | None:
        """Of the sums that drawing from this row needs; None: none are needed."""
        return self.state.sampler.inverse_temperature if self.is_last else None


@dataclass(slots=True)
class StepPlan:
    """The rows of one step. `decode` rows have one token each, `prefill` rows start on a page."""

    decode: list[ScheduledRow] = field(default_factory=list)
    prefill: list[ScheduledRow] = field(default_factory=list)
    admitted: list[RequestState] = field(default_factory=list)
    """Requests that were given pages for the first time."""


class Scheduler:
    """Owns the waiting queue, the running list, the page pool and the prefix cache.

    `max_num_batched_tokens` must be at least `max_num_seqs + page_size`: then every step has room
    for one page of prefill beside all decodes, and neither can starve the other.
    """

    def __init__(self, settings: EngineSettings, *, page_size: int, num_pages: int) -> None:
        assert settings.max_num_batched_tokens >= settings.max_num_seqs + page_size
        self.settings = settings
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(page_size)
        self.turns = Turns()
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []  # by arrival: the last is the youngest
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, state: RequestState) -> None:
        """Queue a request. Its prompt and output fit into the pool when it is alone."""
        self.waiting.append(state)

    def plan(self) -> StepPlan:
        """Choose the rows of the next step and give them their pages."""
        plan = StepPlan()
        budget = self.settings.max_num_batched_tokens
        in_prefill = []
        for state in list(self.running):
            if not state.pages:
                continue  # preempted by an older one, just above
            if state.num_wanted > 1:
                in_prefill.append(state)
            elif self._grow(state):
                budget -= self._schedule(plan, state, 1)
        for state in in_prefill:
            if state.pages:
                budget -= self._schedule(plan, state, self._chunk(state, budget))
        if self.waiting and len(self.running) < self.settings.max_num_seqs:
            self._admit(plan, budget)
        return plan

    def computed(self, row: ScheduledRow) -> None:
        """The row's keys and values are in its pages: share the pages that became whole."""
        state = row.state
        assert state.computed_len == row.start
        state.computed_len = row.end
        if row.end - row.start > 1:  # pages that decode fills are shared when the request ends
            self._share(state)

    def finish(self, state: RequestState, *, reusable: bool = True) -> None:
        """Take a request out, wherever it is. Its whole pages stay in the prefix cache if they are
        `reusable`; all others are free at once."""
        if state.pages:
            self.running.remove(state)
            self._release(state, reusable=reusable)
        else:
            self.waiting.remove(state)

    def check_integrity(self) -> list[str]:
        """Every breach of page ownership, one line each; empty when all is well.

        free + cached + held == total, disjoint; a node's locks are those of the requests below it.
        """
        problems = list(self.pool.breaches)
        owners: dict[int, str] = {}

        def own(page: int, owner: str) -> None:
            if not 0 < page < self.pool.num_pages:
                problems.append(f"page {page} of {owner} does not exist")
            elif page in owners:
                problems.append(f"page {page} belongs to {owners[page]} and to {owner}")
            owners[page] = owner

        for page in self.pool.free_pages():
            own(page, "the free list")
        locks: dict[int, int] = {}
        for state in self.running:
            name = f"request {state.request.request_id}"
            for page in state.pages[state.num_shared_pages :]:
                own(page, name)
            if state.pages[: state.num_shared_pages] != self.cache.pages(state.node):
                problems.append(f"{name} reads other pages than it locked")
            node = state.node
            while node.parent is not None:
                locks[id(node)] = locks.get(id(node), 0) + 1
                node = node.parent
        num_cached = num_locked = 0
        for node in self.cache.nodes():
            own(node.page, "the prefix cache")
            num_cached += 1
            num_locked += node.lock_count > 0
            if node.lock_count != locks.get(id(node), 0):
                problems.append(
                    f"cached page {node.page} has {node.lock_count} locks, "
                    f"{locks.get(id(node), 0)} requests read it"
                )
        counted = (self.cache.num_pages, self.cache.num_evictable)
        if counted != (num_cached, num_cached - num_locked):
            problems.append(
                f"{num_cached} cached pages, {num_locked} locked; the cache counts "
                f"{counted[0]} and {counted[1]} evictable"
            )
        missing = self.pool.total - len(owners)
        if missing > 0:
            problems.append(f"{missing} of {self.pool.total} pages belong to nobody")
        return problems

    @property
    def num_held_pages(self) -> int:
        """Pages that belong to one running request alone."""
        return sum(len(state.pages) - state.num_shared_pages for state in self.running)

    def _schedule(self, plan: StepPlan, state: RequestState, count: int) -> int:
        """Enter `count` positions of a request into the plan; return what they cost."""
        if count:
            row = ScheduledRow(state, state.computed_len, state.computed_len + count)
            # One token runs cheaper as a decode row, and may start anywhere.
            (plan.decode if count == 1 else plan.prefill).append(row)
        return count

    def _chunk(self, state: RequestState, budget: int) -> int:
        """Positions of a request in prefill to run now: all it wants, or whole pages of them."""
        wanted = state.num_wanted
        return wanted if wanted <= budget else budget // self.page_size * self.page_size

    def _grow(self, state: RequestState) -> bool:
        """Give a decoding request the page of its next position. False: it was preempted itself."""
        while state.computed_len >= len(state.pages) * self.page_size:
            if self.pool.num_free + self.cache.num_evictable:
                state.pages += self._take(1)
                continue
            youngest = self.running[-1]
            assert youngest is not self.running[0], "a request alone does not fit"
            self._preempt(youngest)
            if youngest is state:
                return False
        return True

    def _take(self, count: int) -> list[int]:
        """Allocate pages, evicting cached ones as needed."""
        short = count - self.pool.num_free
        if short > 0:
            self.pool.free(self.cache.evict(short))
        return self.pool.allocate(count)

    def _preempt(self, state: RequestState) -> None:
        """Take a request's pages away; it is computed again when there is room. What it computed
        stays in the prefix cache as long as nobody else needs the pages."""
        self.running.remove(state)
        self._release(state, reusable=True)
        state.match_version = -1  # it has more tokens now
        state.num_preemptions += 1
        self.num_preemptions += 1
        place = 0  # before all that never ran, among the preempted by age
        for other in self.waiting:
            if not other.num_preemptions or other.arrival > state.arrival:
                break
            place += 1
        self.waiting.insert(place, state)

    def _share(self, state: RequestState) -> None:
        """Hand a request's whole computed pages over to the prefix cache, and lock them there."""
        if not self.settings.enable_prefix_caching:
            return
        size = self.page_size
        first, end = state.node.depth, state.computed_len // size
        if first >= end:
            return
        node, duplicates = self.cache.insert(
            state.node, state.tokens[first * size : end * size], state.pages[first:end]
        )
        self.cache.lock(node)
        self.cache.unlock(state.node)
        state.node = node
        if duplicates:  # another request computed the same at the same time: read its pages
            state.pages[first:end] = self.cache.pages(node, first)
            self.pool.free(duplicates)

    def _release(self, state: RequestState, *, reusable: bool) -> None:
        if reusable:
            self._share(state)
        own = state.pages[state.num_shared_pages :]
        self.cache.unlock(state.node)
        self.pool.free(own)
        state.node = self.cache.root
        state.pages = []
        state.computed_len = 0

    def _admit(self, plan: StepPlan, budget: int) -> None:
        in_prefill = [state for state in self.running if state.num_wanted > 1]
        first_overdue = self._first_overdue()
        aside: set[RequestState] = set()
        for state in self._admission_order():
            if budget < 1 or len(self.running) == self.settings.max_num_seqs:
                return
            owner = state.request.owner
            if not state.num_preemptions and first_overdue.get(owner, math.inf) < state.arrival:
                return  # it would overtake once too often
            node = self._match(state)
            overdue = state.overtaken >= self.settings.max_overtakes
            if not overdue and self._is_being_computed(state, node.depth, in_prefill):
                aside.add(state)
                continue
            state.computed_len = node.depth * self.page_size
            count = self._chunk(state, budget)
            self.cache.lock(node)  # or its own pages would count as evictable
            needed = -(-state.num_positions // self.page_size) - node.depth
            # One page more for each running request, or the next page boundary preempts this one.
            available = self.pool.num_free + self.cache.num_evictable - len(self.running)
            if count == 0 or needed > available:
                self.cache.unlock(node)
                state.computed_len = 0
                return
            state.node = node
            state.pages = self.cache.pages(node) + self._take(needed)
            self.waiting.remove(state)
            bisect.insort(self.running, state, key=_arrival)
            if not state.num_preemptions:
                self.turns.served(owner)
                for other in self.waiting:
                    is_behind = other.arrival < state.arrival and other.request.owner == owner
                    other.overtaken += is_behind or other in aside
                first_overdue = self._first_overdue()
                state.cached_tokens = state.computed_len
                self.prefix_queries += state.prompt_len
                self.prefix_hits += state.computed_len
                plan.admitted.append(state)
            if state.num_wanted > 1:
                in_prefill.append(state)
            budget -= self._schedule(plan, state, count)

    def _admission_order(self) -> Iterator[RequestState]:
        """The waiting requests in the order in which they may be admitted."""
        queues: dict[str, deque[RequestState]] = {}
        for state in list(self.waiting):
            if state.num_preemptions:
                yield state
            else:
                queues.setdefault(state.request.owner, deque()).append(state)
        if self.settings.scheduling_policy == "lpm" and queues:
            window = max(LPM_WINDOW // len(queues), LEAST_LPM_WINDOW)
            for owner, queue in queues.items():
                head: Iterable[RequestState] = itertools.islice(queue, window)
                queues[owner] = deque(sorted(head, key=self._longest_prefix_first))
        yield from self.turns.in_turn(queues)

    def _first_overdue(self) -> dict[str, int]:
        """Owner -> arrival of its oldest request that may not be overtaken any more."""
        bound = self.settings.max_overtakes
        oldest: dict[str, int] = {}
        for state in self.waiting:
            if state.overtaken >= bound:
                owner = state.request.owner
                oldest[owner] = min(state.arrival, oldest.get(owner, state.arrival))
        return oldest

    def _longest_prefix_first(self, state: RequestState) -> tuple[int, int, int]:
        if state.overtaken >= self.settings.max_overtakes:
            return (0, 0, state.arrival)
        return (1, -self._match(state).depth, state.arrival)

    def _match(self, state: RequestState) -> Node:
        """The longest cached prefix that leaves the position whose logits are needed to compute."""
        if state.match_version != self.cache.version:
            state.match = self.cache.match(state.tokens, state.last_wanted // self.page_size)
            state.match_version = self.cache.version
        return state.match

    def _is_being_computed(
        self, state: RequestState, depth: int, in_prefill: list[RequestState]
    ) -> bool:
        """A running prefill is about to share at least half of what this request would compute."""
        if not self.settings.enable_prefix_caching or state.is_scoring:
            return False
        size = self.page_size
        matched = depth * size
        least = max(size, -(-(len(state.tokens) - matched) // (2 * size)) * size)
        end = matched + least
        if end > state.last_wanted:
            return False
        return any(
            not other.is_scoring
            and other.last_wanted + 1 >= end
            and other.tokens[matched:end] == state.tokens[matched:end]
            and other.tokens[:matched] == state.tokens[:matched]
            for other in in_prefill
        )


def _arrival(state: RequestState) -> int:
    return state.arrival
