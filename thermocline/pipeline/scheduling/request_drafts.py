"""Owns drafts from their offer to their verification: which wait for a step, and which rows of a step are drafted.

Knows no queue and no drafter. A step computes a request's newest token, and drafted ones behind it. Of these rows those
stay whose tokens the model then chose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thermocline.pipeline.scheduling.draft_trees import DraftTrees

if TYPE_CHECKING:
    from thermocline.messages import RequestId
    from thermocline.pipeline.scheduling.batching import Run
    from thermocline.pipeline.scheduling.draft_trees import TreeRun
    from thermocline.pipeline.scheduling.request_blocks import RequestBlocks
    from thermocline.speculation.contract import Draft


@dataclass(slots=True)
class DraftedRows:
    """The drafted tokens of a request's step, in the order of its rows, and those that were chosen so far.

    parents: of each the row before it; row 0 is the newest known token's, row 1 the first drafted one's. rows: of chosen
    ones, in order.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    tree: TreeRun | None = None
    rows: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The last row that stays."""
        return self.rows[-1] if self.rows else 0

    def take(self, token_id: int) -> int:
        """Take the token that the model chose behind the last row; return the row that has it, 0 for none."""
        for row, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            if token == token_id and parent == self.last:
                self.rows.append(row)
                return row
        return 0


class RequestDrafts:
    """The drafts of all requests."""

    def __init__(self, blocks: RequestBlocks) -> None:
        self._blocks = blocks
        self._trees = DraftTrees(blocks)
        self._offered: dict[RequestId, Draft] = {}
        self._rows: dict[RequestId, DraftedRows] = {}

    def __repr__(self) -> str:
        return f"RequestDrafts({len(self._offered)} offered, {len(self._rows)} in steps)"

    def offer(self, draft: Draft) -> None:
        """Keep a draft for the request's next step, in place of what was offered before."""
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
        # The very last token is never computed.
        max_depth = request.max_total_tokens - 1 - run.end
        if max_rows <= 0 or max_depth <= 0:
            return run
        if not draft.is_chain:
            return self._extend_by_tree(run, draft, max_rows, max_depth, spare_blocks)
        count = min(len(draft.tokens), max_rows, max_depth)
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
        self._rows[request.id] = DraftedRows(tokens, tuple(range(len(tokens))))
        return run._replace(num_logits=1 + len(tokens), state=state, drafted=tokens)

    def _extend_by_tree(
        self, run: Run, draft: Draft, max_rows: int, max_depth: int, spare_blocks: int
    ) -> Run:
        grown = self._trees.extend(run, draft, max_rows, max_depth, spare_blocks)
        if grown.tree is None:
            return grown
        parents = grown.tree.shape.parents[1:]
        self._rows[run.request.id] = DraftedRows(grown.drafted, parents, grown.tree)
        return grown

    def foresaw(self, request: RequestId, token_id: int) -> int:
        """Take the token that the model chose next; return the drafted row that has it, which so stays, 0 for none."""
        rows = self._rows.get(request)
        return 0 if rows is None else rows.take(token_id)

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
