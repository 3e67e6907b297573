"""Decides how many tokens of each draft a step verifies: as many as give the most tokens per second. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from thermocline.speculation.acceptance import expected_gains

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.speculation.prices import StepPrices

# By how much a draft must be better than none: estimates are not more exact.
_LEAST_GAIN: Final = 1.02


def choose_lengths(
    chances: Sequence[Sequence[float]],
    num_rows: int,
    prices: StepPrices,
    token_seconds: float = 0.0,
    draft_seconds: float = 0.0,
) -> list[int]:
    """Return how many tokens of each request's draft to verify, 0 for none, that tokens per second are expected highest.

    chances: for each request with a draft, how likely each token is right if those before it are. num_rows: of the step
    without drafts, all requests included. token_seconds: what drafting one token costs that is not drafted yet.
    """
    base = prices.seconds(num_rows)
    lengths = [0] * len(chances)
    if base is None:
        return lengths
    # Gains of a draft fall with its length, so the best rows of all drafts are a beginning of each.
    ranked = sorted(
        ((gain, request) for request, each in enumerate(chances) for gain in expected_gains(each)),
        key=lambda entry: -entry[0],
    )
    tokens = float(num_rows)
    best, best_count = tokens / base * _LEAST_GAIN, 0
    drafted = set[int]()
    for count, (gain, request) in enumerate(ranked, 1):
        tokens += gain
        drafted.add(request)
        seconds = prices.seconds(num_rows + count)
        assert seconds is not None, "a price is known"
        rate = tokens / (seconds + count * token_seconds + len(drafted) * draft_seconds)
        if rate > best:
            best, best_count = rate, count
    for _, request in ranked[:best_count]:
        lengths[request] += 1
    return lengths
