"""Drafters that compute are asked where that pays, by what asking them brought before."""

from __future__ import annotations

from thermocline.messages import RequestId
from thermocline.speculation.contract import Draft, DrafterFacts, DraftWish, Verified
from thermocline.speculation.speculator import Speculator

REQUEST = RequestId(3)


class Slow:
    """Has a guess or none, after a while."""

    facts = DrafterFacts("slow", computes=True)

    def begin(self, request, prompt):
        """Know it."""

    def observe(self, verified):
        """Know it."""

    def end(self, request):
        """Forget it."""


def times_asked(guess: tuple[int, ...], right: int, steps: int = 60) -> list[bool]:
    """Ask for drafts step by step, each of which proposes `guess` with its first `right` tokens right."""
    drafter = Slow()
    speculator = Speculator([drafter])
    speculator.begin(REQUEST, [1], None)
    for num_rows in (1, 2, 3):
        speculator.step_took(num_rows, 1.0 + 0.2 * num_rows)
    known, asked = 5, []
    for _ in range(steps):
        wish = DraftWish(REQUEST, known, 7, 8)
        tasks = speculator.tasks([wish], [], 1)
        asked.append(bool(tasks))
        num_drafted = num_right = 0
        for _, wishes in tasks:
            tokens = guess[: wishes[0].max_tokens]
            drafts = [Draft.chain(wishes[0], tokens)] if tokens else []
            speculator.proposed(drafter, wishes, drafts, 0.1 * max(len(tokens), 1))
            chosen = speculator.choose(drafts, 1)
            num_drafted = sum(len(draft.tokens) for draft in chosen)
            num_right = min(right, num_drafted)
        known += 1 + num_right
        tokens = (7,) * (1 + num_right)
        speculator.observe(Verified(REQUEST, known - 1, tokens, num_drafted, num_right))
    return asked


def test_a_drafter_that_is_right_is_asked_each_time():
    """Two tokens more for little time."""
    assert all(times_asked((7, 7), 2))


def test_a_drafter_that_is_wrong_is_hardly_asked():
    """After some wrong drafts, now and then alone."""
    asked = times_asked((7, 7), 0)
    assert asked[0]
    assert sum(asked) < 10


def test_a_drafter_without_a_guess_is_hardly_asked_either():
    """That it is not sure costs as much as being wrong."""
    asked = times_asked((), 0)
    assert asked[0]
    assert sum(asked) < 10
