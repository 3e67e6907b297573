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
    return _best(chances, num_rows, prices, (token_seconds, draft_seconds))[1]


def expected_rate(
    chances: Sequence[float],
    num_rows: int,
    prices: StepPrices,
    cost: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Return the tokens per second of a step with the best part of one draft, or with none of it; 0 before any price.

    cost: seconds of a token that is not drafted yet, and of its draft.
    """
    return _best([chances], num_rows, prices, cost)[0]


def _best(
    chances: Sequence[Sequence[float]],
    num_rows: int,
    prices: StepPrices,
    cost: tuple[float, float],
) -> tuple[float, list[int]]:
    """Return the highest tokens per second, and each draft's length with it."""
    base = prices.seconds(num_rows)
    lengths = [0] * len(chances)
    if base is None:
        return 0.0, lengths
    # Gains of a draft fall with its length, so the best rows of all drafts are a beginning of each.
    ranked = sorted(
        ((gain, request) for request, each in enumerate(chances) for gain in expected_gains(each)),
        key=lambda entry: -entry[0],
    )
    tokens, plain = float(num_rows), num_rows / base
    best, best_count = plain * _LEAST_GAIN, 0
    drafted = set[int]()
    for count, (gain, request) in enumerate(ranked[: prices.most_more_rows(num_rows)], 1):
        tokens += gain
        drafted.add(request)
        seconds = prices.seconds(num_rows + count)
        assert seconds is not None, "a price is known"
        rate = tokens / (seconds + count * cost[0] + len(drafted) * cost[1])
        if rate > best:
            best, best_count = rate, count
    for _, request in ranked[:best_count]:
        lengths[request] += 1
    return (best if best_count else plain), lengths
