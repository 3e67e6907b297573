"""What a benchmark of speculation drafts with is right as often as it says, and its runs are judged by what they found."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.scripted_drafts import Script, ScriptedDrafter, right_places
from benchmarks.speculation import Clock, judge
from thermocline.messages import RequestId
from thermocline.speculation.contract import DraftWish

PROMPT, ANSWER = (1,) * 32, tuple(range(100, 164))


def script_of(acceptance: float) -> Script:
    script = Script()
    script.answer, script.acceptance = ANSWER, acceptance
    return script


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 1.0])
def test_the_share_of_right_guesses_is_exact(acceptance):
    """Of first guesses; and each place's guess is the same in every draft that has it."""
    script = script_of(acceptance)
    drafter = ScriptedDrafter(script)
    drafter.begin(RequestId(1), PROMPT)
    guesses = [script.guess(place) for place in range(64)]
    right = sum(guess == token for guess, token in zip(guesses, ANSWER, strict=True))
    assert right == round(acceptance * 64) == len(right_places(64, acceptance, 0))
    for done in (0, 7, 50, 63):
        (draft,) = drafter.propose([DraftWish(RequestId(1), 32 + done, 0, 8)])
        assert list(draft.tokens) == guesses[done : done + 8]
        assert draft.is_chain
    assert drafter.propose([DraftWish(RequestId(1), 96, 0, 8)]) == []


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("nodes", [1, 2, 5, 16])
def test_a_tree_has_the_likeliest_nodes(acceptance, nodes):
    """Parents come before their children, children of one token differ, and what is likelier comes first."""
    drafter = ScriptedDrafter(script_of(acceptance), has_branches=True)
    drafter.begin(RequestId(1), PROMPT)
    (draft,) = drafter.propose([DraftWish(RequestId(1), 40, 0, nodes)])
    assert 1 <= len(draft.tokens) <= nodes
    reached: list[float] = []
    for node, (parent, chance) in enumerate(zip(draft.parents, draft.confidence, strict=True)):
        assert -1 <= parent < node
        reached.append(chance * (reached[parent] if parent >= 0 else 1.0))
    assert all(a >= b - 1e-12 for a, b in pairwise(reached))
    places = list(zip(draft.parents, draft.tokens, strict=True))
    assert len(set(places)) == len(places)


def test_a_second_guess_is_right_as_often_where_the_first_is_wrong():
    """About: which places it is for is drawn apart from the first guesses'."""
    script = script_of(0.5)
    wrong = [place for place in range(64) if script.guess(place) != ANSWER[place]]
    second = [place for place in wrong if script.guess(place, 1) == ANSWER[place]]
    assert 0.3 < len(second) / len(wrong) < 0.7
    assert all(script.guess(place, 1) != script.guess(place) for place in range(64))


@pytest.mark.parametrize(
    ("auto", "expected"), [(1.46, []), (1.40, ["case: auto"]), (0.96, ["case: auto"])]
)
def test_the_choice_is_judged_by_the_best_fixed_setting(auto, expected):
    """At least 0.95 of the best, and 0.97 of no drafts."""
    speeds = {"off": [1.0, 1.0], "auto": [auto, auto], "2 drafted": [1.5, 1.5], "4 drafted": [1, 1]}
    assert judge("case", speeds, {"auto": ["off", "2 drafted", "4 drafted"]}) == expected


def test_the_time_is_divided_by_what_is_left():
    """Each part has its share of what those before it left; when nothing is left, none."""
    clock = Clock(100.0, [1.0, 1.0, 2.0])
    assert clock.next_part() == pytest.approx(25.0, rel=0.01)
    assert clock.next_part() == pytest.approx(100 / 3, rel=0.01)
    assert clock.next_part() == pytest.approx(100.0, rel=0.01)
    assert Clock(-5.0, [1.0]).next_part() == 0.0
