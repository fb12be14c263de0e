"""What the engine knows about a request while it is in the engine."""

from __future__ import annotations

from shark_llm.engine.prefix_cache import Node
from shark_llm.engine.request import Request, TokenLogprobs
from shark_llm.engine.sampling import SamplerState


class RequestState:
    """A request with its tokens and pages. Only scheduler and engine core change it.

        position   0 ........ shared ........ computed ........ len(tokens)
        keys in    pages of the prefix cache | own pages       | not computed yet
        pages      [0, num_shared_pages)     | [num_shared_pages, len(pages))

    Pages are allocated for the whole prompt at admission, then one by one. `tokens` is the prompt
    and what was generated: after a preemption both are computed again, nothing is drawn again.
    """

    __slots__ = (
        "admitted",
        "arrival",
        "cached_tokens",
        "computed_len",
        "first_token",
        "match",
        "match_version",
        "node",
        "num_preemptions",
        "overtaken",
        "pages",
        "prompt_len",
        "prompt_logprobs",
        "request",
        "sampler",
        "submitted",
        "tokens",
    )

    def __init__(
        self, request: Request, *, arrival: int, sampler: SamplerState, root: Node, submitted: float
    ) -> None:
        self.request = request
        self.arrival = arrival
        """Order of submission. The youngest, with the highest number, is preempted first."""
        self.sampler = sampler
        self.tokens = list(request.prompt_ids)
        self.prompt_len = len(request.prompt_ids)
        self.computed_len = 0
        self.pages: list[int] = []
        self.node = root
        """The locked end of the shared pages in the prefix cache; the root while there are none."""
        self.cached_tokens = 0
        """Prompt tokens that the cache had at the first admission."""
        self.num_preemptions = 0
        self.overtaken = 0
        """Later arrivals that were admitted while this one waited."""
        self.match = root
        self.match_version = -1
        """While waiting: what the prefix cache had for it, and in which version of the cache."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if request.sampling.prompt_logprobs is None else [None]
        )
        """Entry i: how likely prompt token i was. Grows to `prompt_len` entries."""
        self.submitted = submitted
        self.admitted: float | None = None
        self.first_token: float | None = None

    @property
    def num_shared_pages(self) -> int:
        return self.node.depth

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def is_scoring(self) -> bool:
        """Prompt logprobs were asked for and are not complete yet."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len

    @property
    def last_wanted(self) -> int:
        """The next position whose logits are needed; those before it may be computed many at a
        time, or be taken from the cache.

        Logits are returned after the last token of a row only, so a prompt that is to be scored
        goes token by token, from the first one that is not scored yet.
        """
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len:
            return len(self.prompt_logprobs) - 1
        return len(self.tokens) - 1

    @property
    def num_positions(self) -> int:
        """Positions whose keys must have a place before the next token can be drawn. A prompt that
        is scored only never reads its last token, and may be one longer than the pages hold."""
        return len(self.tokens) - (self.request.sampling.max_tokens == 0)

    @property
    def num_wanted(self) -> int:
        """Positions to compute until the next logits are there: 1 in decode, more in prefill."""
        return self.last_wanted + 1 - self.computed_len
