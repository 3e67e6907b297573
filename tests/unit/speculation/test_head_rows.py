"""From how many first tokens drafts are taken: decided by the request's own tokens."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.speculation.head_rows import TokenShares

CUTS = (1000, 2000, 4000)


def tokens_of(*parts):
    """Return tokens in random order: so many from each range."""
    chance = np.random.default_rng(1)
    found = np.concatenate([chance.integers(low, high, count) for low, high, count in parts])
    chance.shuffle(found)
    return found.tolist()


@pytest.mark.parametrize(
    ("parts", "cut"),
    [
        ([(0, 1000, 500)], 1000),
        ([(0, 1000, 485), (1000, 4000, 15)], 1000),
        ([(0, 1000, 400), (1000, 2000, 100)], 2000),
        ([(0, 2000, 400), (2000, 4000, 100)], 4000),
        ([(2000, 4000, 500)], 4000),
        ([(0, 1000, 30)], 4000),  # too few to know
        ([], 4000),
    ],
)
def test_a_cut_holds_nearly_all_of_the_requests_tokens(parts, cut):
    """Rare tokens cost drafts, the more the smaller the cut is."""
    shares = TokenShares(CUTS)
    if parts:
        shares.see(tokens_of(*parts))
    assert shares.chosen() == cut


def test_an_answer_in_another_language_has_the_whole_head():
    """What the prompt was is forgotten within some dozens of tokens, and comes back."""
    shares = TokenShares(CUTS)
    shares.see(tokens_of((0, 1000, 5000)))
    assert shares.chosen() == 1000
    for _ in range(40):
        shares.see([3000])
    assert shares.chosen() == 4000
    shares.see(tokens_of((0, 1000, 800)))
    assert shares.chosen() == 1000


def test_a_small_vocabulary_has_one_choice():
    """Its head takes too little to be cut."""
    shares = TokenShares((300,))
    shares.see([1, 2, 3] * 100)
    assert shares.chosen() == 300
