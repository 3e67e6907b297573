"""Estimates how likely a drafted token is right, from what became of those before it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# What a token counts less with each one after it: the last 20 are what matters, however long the drafts were.
_KEPT: Final = 0.95
# A first guess counts as much as so many drafted tokens, and less with each one that is judged.
_PRIOR_TOKENS: Final = 3.0
_PRIOR_KEPT: Final = 0.9
# After two drafts in a row of which nothing was right, what was before counts less with each of the next six: the text has changed.
_HASTE: Final = {3: 2, 4: 3, 5: 4, 6: 4, 7: 4, 8: 4}


class Acceptance:
    """The probability that a drafted token is right, given that those before it are.

    What a request's drafts tell is told to `overall` as well, where later requests begin.
    """

    def __init__(self, prior: float, overall: Acceptance | None = None) -> None:
        """prior: the probability before anything was seen, where there is no `overall`."""
        self._overall = overall
        self._prior = prior if overall is None else overall.probability
        self._right = self._judged = 0.0
        self._prior_tokens = _PRIOR_TOKENS
        self._num_wrong = 0
        """Drafts in a row of which nothing was right."""

    def __repr__(self) -> str:
        return f"Acceptance({self.probability:.2f})"

    @property
    def probability(self) -> float:
        """Above 0 and below 1, if the prior is."""
        prior = self._prior_tokens
        return (self._right + self._prior * prior) / (self._judged + prior)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft: the tokens behind the first wrong one say nothing."""
        if self._overall is not None:
            self._overall.observe(num_drafted, num_accepted)
        num_judged = min(num_drafted, num_accepted + 1)
        self._num_wrong = 0 if num_accepted else self._num_wrong + 1
        kept = _KEPT ** (num_judged * _HASTE.get(self._num_wrong, 1))
        self._prior_tokens *= _PRIOR_KEPT**num_judged
        self._right = self._right * kept + num_accepted
        self._judged = self._judged * kept + num_judged


class Calibration:
    """By how much a drafter's own estimates are too high or too low, as its drafts turned out."""

    def __init__(self) -> None:
        self._right = self._claimed = 0.0

    def __repr__(self) -> str:
        return f"Calibration({self.factor:.2f})"

    @property
    def factor(self) -> float:
        """What to multiply its estimates by."""
        return (self._right + _PRIOR_TOKENS) / (self._claimed + _PRIOR_TOKENS)

    def observe(self, claimed: Sequence[float], num_accepted: int) -> None:
        """Learn from a chain. claimed: how likely each token was said to be right, if those before it are."""
        judged = claimed[: num_accepted + 1]
        kept = _KEPT ** len(judged)
        self._right = self._right * kept + num_accepted
        self._claimed = self._claimed * kept + sum(judged)


def expected_gains(probabilities: Sequence[float]) -> list[float]:
    """Return by how many tokens each row of a draft lengthens a step, on average: the product up to it."""
    gains, reached = [], 1.0
    for probability in probabilities:
        reached *= probability
        gains.append(reached)
    return gains
