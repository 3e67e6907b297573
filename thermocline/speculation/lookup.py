"""Drafts from a request's own text: what followed the last time that the newest tokens stood there.

Pays where an answer repeats its prompt or itself, as edited code does, and costs microseconds where it does not. Pure.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from thermocline.speculation.acceptance import Acceptance
from thermocline.speculation.contract import Draft, DrafterFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.messages import RequestId
    from thermocline.speculation.contract import DraftWish, Verified

_MIN_MATCH: Final = 3
"""Tokens that must be alike. Of pairs, one in three is in any text."""
_MAX_MATCH: Final = 32
"""A match is not measured further."""
_MAX_PLACES: Final = 8
"""Earlier places that are compared, the latest first."""
_MAX_INDEXED: Final = 4096
"""Tokens that one call adds to the index, which takes 2 ms: a long prompt is indexed in several steps."""
# By the length of a match: the first guess of how likely its tokens are right, until the request's own drafts tell.
_PRIORS: Final = ((5, 0.4), (9, 0.6), (17, 0.8), (_MAX_MATCH + 1, 0.9))


class SuffixIndex:
    """Finds where the end of a growing sequence stood before, by its last tokens.

    Adding a token takes constant time, and memory grows by one entry for each.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = array("i", tokens)
        self._latest: dict[int, int] = {}
        """By _MIN_MATCH tokens, as one number, the latest place behind them."""
        self._before = array("i", bytes(4 * _MIN_MATCH))
        """By place, the place before it that stands behind the same tokens; 0 for none."""

    def __repr__(self) -> str:
        return f"SuffixIndex({len(self._before)} of {len(self.tokens)} tokens)"

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end."""
        self.tokens.extend(tokens)

    def find(self) -> tuple[int, int] | None:
        """Return the place behind the longest earlier match of the sequence's end, the latest of these, and its length."""
        tokens, end = self.tokens, len(self.tokens)
        self._index(min(end, len(self._before) + _MAX_INDEXED))
        if end < _MIN_MATCH:
            return None
        place = self._latest.get(_key(tokens, end), 0)
        best = None
        for _ in range(_MAX_PLACES):
            if not place:
                break
            length = _MIN_MATCH
            while (
                length < min(_MAX_MATCH, place)
                and tokens[place - 1 - length] == tokens[end - 1 - length]
            ):
                length += 1
            if best is None or length > best[1]:
                best = place, length
            if length == _MAX_MATCH:
                break
            place = self._before[place]
        return best

    def following(self, place: int, count: int) -> list[int]:
        """Return `count` tokens from a place on. Behind the sequence's end they begin again: so a loop goes on."""
        found = list(self.tokens[place : place + count])
        period = len(found)
        return [found[n % period] for n in range(count)]

    def _index(self, end: int) -> None:
        """Make the places before `end` known: each stands behind the tokens before it."""
        tokens, latest, before = self.tokens, self._latest, self._before
        for place in range(len(before), end):
            key = _key(tokens, place)
            before.append(latest.get(key, 0))
            latest[key] = place


def _key(tokens: array[int], place: int) -> int:
    """Return the tokens before a place as one number, which takes a third of a tuple's memory."""
    return tokens[place - 3] << 64 | tokens[place - 2] << 32 | tokens[place - 1]


class LookupDrafter:
    """See `Drafter`. A longer match gives a longer draft."""

    facts = DrafterFacts("lookup")

    def __init__(self) -> None:
        self._indexes: dict[RequestId, SuffixIndex] = {}
        self._acceptance: dict[RequestId, dict[int, Acceptance]] = {}
        """By request, and by the longest match that an estimate is for."""
        self._overall = {below: Acceptance(prior) for below, prior in _PRIORS}
        self._drafted: dict[RequestId, int] = {}
        """For which matches the request's latest draft was."""

    def __repr__(self) -> str:
        return f"LookupDrafter({len(self._indexes)} requests)"

    def begin(self, request: RequestId, prompt: Sequence[int]) -> None:
        self._indexes[request] = SuffixIndex(prompt)
        self._acceptance[request] = {
            below: Acceptance(prior, self._overall[below]) for below, prior in _PRIORS
        }

    def propose(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        drafts = []
        for wish in wishes:
            index = self._indexes[wish.request]
            assert len(index.tokens) == wish.num_known, "a token was not told"
            found = index.find()
            if found is None:
                continue
            place, length = found
            below = next(below for below, _ in _PRIORS if length < below)
            self._drafted[wish.request] = below
            tokens = index.following(place, min(wish.max_tokens, length - 1))
            chance = self._acceptance[wish.request][below].probability
            drafts.append(Draft.chain(wish, tokens, [chance] * len(tokens)))
        return drafts

    def observe(self, verified: Verified) -> None:
        self._indexes[verified.request].extend(verified.tokens)
        if verified.drafter == self.facts.name:
            acceptance = self._acceptance[verified.request][self._drafted[verified.request]]
            acceptance.observe(verified.num_drafted, verified.num_accepted)

    def end(self, request: RequestId) -> None:
        del self._indexes[request], self._acceptance[request]
        self._drafted.pop(request, None)
