"""Owns drafts from their offer to their verification: which wait for a step, and which rows of a step are drafted.

Knows no queue and no drafter. A step computes a request's newest token, and drafted ones behind it. Of these rows those
stay whose tokens the model then chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.messages import RequestId
    from thermocline.pipeline.scheduling.batching import Run
    from thermocline.pipeline.scheduling.request_blocks import RequestBlocks
    from thermocline.speculation.contract import Draft


@dataclass(slots=True)
class DraftedRows:
    """The drafted tokens of a request's step, and how many of them were chosen so far."""

    tokens: tuple[int, ...]
    num_accepted: int = 0


class RequestDrafts:
    """The drafts of all requests."""

    def __init__(self, blocks: RequestBlocks) -> None:
        self._blocks = blocks
        self._offered: dict[RequestId, Draft] = {}
        self._rows: dict[RequestId, DraftedRows] = {}

    def __repr__(self) -> str:
        return f"RequestDrafts({len(self._offered)} offered, {len(self._rows)} in steps)"

    def offer(self, draft: Draft) -> None:
        """Keep a chain of tokens for the request's next step, in place of what was offered before."""
        assert draft.is_chain, "only chains are verified"
        assert draft.tokens, "a draft has at least one token"
        self._offered[draft.request] = draft

    def is_offered(self, request: RequestId, num_known: int) -> bool:
        """Whether there is a draft for a request with so many known tokens."""
        draft = self._offered.get(request)
        return draft is not None and draft.num_known == num_known

    def extend(self, run: Run, max_rows: int, spare_blocks: int) -> Run:
        """Return a run of a decode step with drafted tokens behind it: as many as were offered, at most `max_rows`, and
        as there is room for. Nobody else loses anything for them; so many blocks are left over.
        """
        request = run.request
        draft = self._offered.pop(request.id, None)
        if draft is None or draft.num_known != len(request.known):
            return run
        if (run.start, run.end) != (draft.num_known - 1, draft.num_known):
            return run  # it was preempted meanwhile, and is computed again
        last = request.max_total_tokens - 1  # the very last token is never computed
        count = min(len(draft.tokens), max_rows, last - run.end)
        count = self._blocks.draft_room(request, run.end, count, spare_blocks)
        if count <= 0:
            return run
        state, tokens = run.state, draft.tokens[:count]
        if state is not None:
            saved = self._blocks.draft_states(request, count)
            tokens = tokens[: len(saved)]
            state = state._replace(saves=tuple(enumerate(saved, 1)))
            if not tokens:
                return run
        self._rows[request.id] = DraftedRows(tokens)
        return run._replace(num_logits=1 + len(tokens), state=state, drafted=tokens)

    def foresaw(self, request: RequestId, token_id: int) -> bool:
        """Take the token that the model chose next; whether it is the next drafted one, whose row so stays."""
        rows = self._rows.get(request)
        if rows is None or rows.tokens[rows.num_accepted :][:1] != (token_id,):
            return False
        rows.num_accepted += 1
        return True

    def verified(self, request: RequestId) -> DraftedRows | None:
        """Return what came of a request's step, and forget it; None if it had no drafted rows."""
        return self._rows.pop(request, None)

    def forget(self, request: RequestId) -> None:
        """Forget a request that has ended."""
        self._offered.pop(request, None)
        self._rows.pop(request, None)

    def check_integrity(self, in_flight: frozenset[RequestId], known: frozenset[RequestId]) -> None:
        """Assert that only requests with a chunk in flight have drafted rows, and that only known ones have drafts."""
        assert self._rows.keys() <= in_flight, "drafted rows of no step"
        assert self._offered.keys() <= known, "a draft of a request that has ended"
