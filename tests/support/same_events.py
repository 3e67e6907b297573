"""Whether two readers read the same, where one may have been so far behind that it got several tokens in one event."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.messages import TokenEvent


def are_same(events: Sequence[TokenEvent], others: Sequence[TokenEvent]) -> bool:
    """Return whether both are equal event by event, those joined that either reader got as one."""
    shared = set(_ends(events)) & set(_ends(others))
    return _joined(events, shared) == _joined(others, shared)


def begin_same(events: Sequence[TokenEvent], others: Sequence[TokenEvent]) -> bool:
    """The same of those up to the last token that ends an event of both: for a reader that went away."""
    shared = set(_ends(events)) & set(_ends(others))
    cut = [
        [each for each, end in zip(one, _ends(one), strict=True) if end <= max(shared, default=0)]
        for one in (events, others)
    ]
    return bool(cut[0] or not events) and are_same(*cut)


def _ends(events: Sequence[TokenEvent]) -> list[int]:
    """How many tokens there were after each event."""
    return list(accumulate(len(event.token_ids) for event in events))


def _joined(events: Sequence[TokenEvent], ends: set[int]) -> list[TokenEvent]:
    """Cut after those ends; what comes without a token belongs to the tokens before it."""
    runs: list[list[TokenEvent]] = [[]]
    reached = 0
    for event, end in zip(events, _ends(events), strict=True):
        if event.token_ids and reached in ends:
            runs.append([])
        runs[-1].append(event)
        reached = end
    return [_one(run) for run in runs if run]


def _one(run: list[TokenEvent]) -> TokenEvent:
    return replace(
        run[-1],
        token_ids=tuple(chain.from_iterable(event.token_ids for event in run)),
        text="".join(event.text for event in run),
        logprobs=tuple(chain.from_iterable(event.logprobs for event in run)),
        top_logprobs=tuple(chain.from_iterable(event.top_logprobs for event in run)),
    )
