"""What followed the end of a text the last time it stood there."""

from __future__ import annotations

import random

import pytest

from thermocline.messages import RequestId
from thermocline.speculation.contract import DraftWish, Verified
from thermocline.speculation.lookup import LookupDrafter, SuffixIndex

REQUEST = RequestId(3)


def longest_match(tokens: list[int]) -> int:
    """Return the length of the longest end that stood before with something behind it, the slow way."""
    end = len(tokens)
    for length in range(min(32, end - 1), 2, -1):
        if any(
            tokens[place - length : place] == tokens[end - length :] for place in range(length, end)
        ):
            return length
    return 0


def test_it_finds_the_longest_match():
    """On random texts of few tokens it finds what a search through all places finds, as the text grows."""
    chance = random.Random(2)
    for _ in range(20):
        tokens = [chance.randrange(3) for _ in range(12)]
        index = SuffixIndex(tokens)
        for _ in range(12):
            found, longest = index.find(), longest_match(tokens)
            assert (found is None) == (longest == 0)
            if found is not None:
                place, length = found
                # Only the latest places are compared.
                assert 3 <= length <= longest
                assert tokens[place - length : place] == tokens[len(tokens) - length :]
            tokens.append(chance.randrange(3))
            index.extend(tokens[-1:])


def test_the_longest_of_several_matches_wins():
    """An earlier place that agrees for longer beats a later one."""
    index = SuffixIndex([1, 2, 3, 4, 5, 70, 9, 9, 3, 4, 5, 80, 9, 1, 2, 3, 4, 5])
    place, length = index.find()
    assert length == 5
    assert index.following(place, 1) == [70]


def test_a_loop_goes_on():
    """Behind the end of the text its period is repeated."""
    index = SuffixIndex([1, 2, 3, 1, 2, 3, 1, 2, 3])
    place, _ = index.find()
    assert index.following(place, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_long_prompt_is_indexed_in_parts():
    """One call indexes a bounded part, so that it takes no longer; the last call has all of it."""
    tokens = [*range(10_000), 0, 1, 2]
    index = SuffixIndex(tokens)
    sizes = []
    for _ in range(4):
        index.find()
        sizes.append(len(index._before))
    assert max(b - a for a, b in zip([3, *sizes], sizes, strict=False)) <= 4096
    assert index.find() == (3, 3)


@pytest.mark.parametrize("prompt", [[], [1], [1, 2], [1, 1, 1]])
def test_a_text_too_short_has_no_match(prompt):
    """Nothing is proposed where hardly anything stands."""
    drafter = LookupDrafter()
    drafter.begin(REQUEST, prompt)
    assert drafter.propose([DraftWish(REQUEST, len(prompt), 1, 8)]) == []
    drafter.end(REQUEST)


def test_a_longer_match_gives_a_longer_and_surer_draft():
    """One token less than agree, as many as are wanted at most."""
    text = list(range(20))
    drafts = []
    for agree in (3, 6, 12):
        drafter = LookupDrafter()
        drafter.begin(REQUEST, [*text, 99, *text[:agree]])
        drafts += drafter.propose([DraftWish(REQUEST, 21 + agree, text[agree - 1], 8)])
    assert [draft.tokens for draft in drafts] == [(3, 4), (6, 7, 8, 9, 10), tuple(range(12, 20))]
    assert all(draft.is_chain for draft in drafts)
    chances = [draft.confidence[0] for draft in drafts]
    assert chances == sorted(chances)


def test_its_confidence_follows_the_request():
    """Where its drafts are wrong it says so, for matches of that length and for this request alone."""
    drafter, other = LookupDrafter(), RequestId(4)
    text = [1, 2, 3, 4, 1, 2, 3]
    for request in (REQUEST, other):
        drafter.begin(request, text)

    def chance(request, num_known):
        (draft,) = drafter.propose([DraftWish(request, num_known, 3, 8)])
        return draft.confidence[0]

    first = chance(REQUEST, 7)
    num_known = 7
    for wrong in (50, 60, 70):
        chance(REQUEST, num_known)
        tokens = (wrong, 1, 2, 3)
        drafter.observe(Verified(REQUEST, num_known - 1, tokens, 2, 0, "lookup"))
        num_known += len(tokens)
    assert chance(REQUEST, num_known) < first
    assert chance(other, 7) == first
    drafter.end(REQUEST)
    drafter.end(other)
    assert repr(drafter) == "LookupDrafter(0 requests)"
