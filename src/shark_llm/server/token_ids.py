"""`return_token_ids`: what was generated as token ids, beside its text, as vLLM returns it."""

from __future__ import annotations

from collections.abc import Sequence

from shark_llm.engine.request import TokenEvent
from shark_llm.server.text_stream import Finish


def token_ids(tokens: Sequence[TokenEvent], finish: Finish | None) -> list[int]:
    """The ids of a delta or of a whole answer, the one that stopped it included: joined over all
    deltas they are as many as `completion_tokens`."""
    ids = [token.token_id for token in tokens]
    if finish is not None and finish.stop_token_id is not None:
        ids.append(finish.stop_token_id)
    return ids
