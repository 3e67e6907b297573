"""Estimates how likely a drafted token is right, from what became of those before it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# What a token counts less with each one after it: the last 15 are what matters, however long the drafts were.
_KEPT: Final = 0.93
# A first guess counts as much as so many drafted tokens.
_PRIOR_TOKENS: Final = 2.0


class Acceptance:
    """The probability that a drafted token is right, given that those before it are.

    What a request's drafts tell is told to `overall` as well, where later requests begin.
    """

    def __init__(self, prior: float, overall: Acceptance | None = None) -> None:
        """prior: the probability before anything was seen, where there is no `overall`."""
        self._overall = overall
        self._prior = prior if overall is None else overall.probability
        self._right = self._judged = 0.0

    def __repr__(self) -> str:
        return f"Acceptance({self.probability:.2f})"

    @property
    def probability(self) -> float:
        """Above 0 and below 1, if the prior is."""
        return (self._right + self._prior * _PRIOR_TOKENS) / (self._judged + _PRIOR_TOKENS)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft: the tokens behind the first wrong one say nothing."""
        if self._overall is not None:
            self._overall.observe(num_drafted, num_accepted)
        num_judged = min(num_drafted, num_accepted + 1)
        kept = _KEPT**num_judged
        self._right = self._right * kept + num_accepted
        self._judged = self._judged * kept + num_judged


def expected_gains(probabilities: Sequence[float]) -> list[float]:
    """Return by how many tokens each row of a draft lengthens a step, on average: the product up to it."""
    gains, reached = [], 1.0
    for probability in probabilities:
        reached *= probability
        gains.append(reached)
    return gains
