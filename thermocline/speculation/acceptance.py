"""Estimates how likely a drafted token is right, from what became of those before it. Pure."""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# What a token counts less with each one after it, in the slow estimate and in the quick one: the last 50 and the last 14 are
# what matters, however long the drafts were.
_KEPT: Final = 0.98
_QUICK_KEPT: Final = 0.93
_PRIOR_TOKENS: Final = 4.0
"""A first guess counts as much as so many drafted tokens."""
_SURPRISE: Final = 1.0
"""Nats: so unlikely are the latest tokens by the slow estimate, beside their own, when both estimates count alike."""
_STEEPNESS: Final = 2.0
_DISBELIEF: Final = 0.25
"""Of what the slow estimate remembers, what a draft takes away that it does not explain."""
_RAREST: Final = 0.05
"""What a slow estimate calls less likely than this is not taken for less likely: a single token proves little."""
_MARGIN: Final = 0.01
_CLAIM_KEPT, _CLAIM_TOKENS = 0.95, 3.0
"""The same for what a drafter says of itself: how much less with each token, and how many tokens it is believed at first."""


class Acceptance:
    """The probability that a drafted token is right, given that those before it are.

    What a request's drafts tell is told to `overall` as well, where later requests begin. Two estimates: a slow one, which chance
    hardly moves, and one of the latest tokens alone, which counts the more the less the slow one explains them: then the
    text has changed.
    """

    def __init__(self, prior: float, overall: Acceptance | None = None) -> None:
        """prior: the probability before anything was seen, where there is no `overall`."""
        self._overall = overall
        self._judged = _PRIOR_TOKENS
        self._right = _PRIOR_TOKENS * (prior if overall is None else overall.probability)
        self._latest_right = self._latest_judged = 0.0

    def __repr__(self) -> str:
        return f"Acceptance({self.probability:.2f})"

    @property
    def probability(self) -> float:
        """Above 0 and below 1."""
        slow = self._right / self._judged
        quick = (self._latest_right + 0.5 * slow) / (self._latest_judged + 0.5)
        mixed = slow + (quick - slow) * self._quick_share()
        return min(max(mixed, _MARGIN), 1.0 - _MARGIN)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft: the tokens behind the first wrong one say nothing."""
        if self._overall is not None:
            self._overall.observe(num_drafted, num_accepted)
        num_judged = min(num_drafted, num_accepted + 1)
        kept = _QUICK_KEPT**num_judged
        self._latest_right = self._latest_right * kept + num_accepted
        self._latest_judged = self._latest_judged * kept + num_judged
        kept = _KEPT**num_judged * (1.0 - _DISBELIEF * self._quick_share())
        self._right = self._right * kept + num_accepted
        self._judged = self._judged * kept + num_judged

    def _quick_share(self) -> float:
        """Return how much the latest tokens count: by the ratio of their likelihoods, by themselves and by the slow estimate."""
        if not self._latest_judged:
            return 0.0
        quick = self._latest_right / self._latest_judged
        slow = min(max(self._right / self._judged, _RAREST), 1.0 - _RAREST)
        surprise = _information(quick, slow) + _information(1.0 - quick, 1.0 - slow)
        return 1.0 / (1.0 + exp(_STEEPNESS * (_SURPRISE - self._latest_judged * surprise)))


def _information(share: float, expected: float) -> float:
    return share * log(share / expected) if share > 0.0 else 0.0


class Calibration:
    """By how much a drafter's own estimates are too high or too low, as its drafts turned out.

    `overall` is for calibrations what it is for `Acceptance`.
    """

    def __init__(self, overall: Calibration | None = None) -> None:
        self._overall = overall
        self._prior = 1.0 if overall is None else overall.factor
        self._right = self._claimed = 0.0

    def __repr__(self) -> str:
        return f"Calibration({self.factor:.2f})"

    @property
    def factor(self) -> float:
        """What to multiply its estimates by."""
        return (self._right + self._prior * _CLAIM_TOKENS) / (self._claimed + _CLAIM_TOKENS)

    def observe(self, claimed: Sequence[float], num_accepted: int) -> None:
        """Learn from a chain. claimed: how likely each token was said to be right, if those before it are."""
        if self._overall is not None:
            self._overall.observe(claimed, num_accepted)
        judged = claimed[: num_accepted + 1]
        kept = _CLAIM_KEPT ** len(judged)
        self._right = self._right * kept + num_accepted
        self._claimed = self._claimed * kept + sum(judged)


def expected_gains(probabilities: Sequence[float]) -> list[float]:
    """Return by how many tokens each row of a draft lengthens a step, on average: the product up to it."""
    gains, reached = [], 1.0
    for probability in probabilities:
        reached *= probability
        gains.append(reached)
    return gains
