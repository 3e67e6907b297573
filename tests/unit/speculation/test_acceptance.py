"""Acceptance is learnt from drafts, the latest most."""

from __future__ import annotations

import random

import pytest

from thermocline.speculation.acceptance import Acceptance, Calibration, expected_gains


def test_it_begins_with_the_prior_and_forgets_it():
    """Before any draft it is the prior; after many it is what they were."""
    acceptance = Acceptance(0.6)
    assert acceptance.probability == pytest.approx(0.6)
    for _ in range(100):
        acceptance.observe(4, 0)
    assert acceptance.probability < 0.1
    for _ in range(100):
        acceptance.observe(4, 4)
    assert acceptance.probability > 0.9


def test_tokens_behind_the_first_wrong_one_are_not_judged():
    """Of eight tokens whose second is wrong, one was right and one wrong."""
    acceptance = Acceptance(0.5)
    for _ in range(200):
        acceptance.observe(8, 1)
    assert acceptance.probability == pytest.approx(0.5)


def test_a_row_gains_what_all_rows_up_to_it_allow():
    """The gain of each row is the product of the chances up to it."""
    assert expected_gains([0.5, 0.5, 1.0, 0.0]) == [0.5, 0.25, 0.25, 0.0]
    assert expected_gains([]) == []


def test_a_request_begins_where_others_are():
    """What earlier requests told is the first guess of a later one; their own drafts are their own."""
    overall = Acceptance(0.6)
    first, second = Acceptance(0.6, overall), Acceptance(0.6, overall)
    for _ in range(100):
        first.observe(2, 0)
    assert second.probability == pytest.approx(0.6)
    assert Acceptance(0.6, overall).probability == pytest.approx(first.probability, abs=0.02)


def test_chance_hardly_moves_it():
    """Of guesses that are right by 0.8, whenever they are made, the estimate stays near that: a long draft pays or it does not."""
    draws = random.Random(5)
    acceptance = Acceptance(0.6)
    strays = []
    for number in range(600):
        right = 0
        while right < 4 and draws.random() < 0.8:
            right += 1
        acceptance.observe(4, right)
        if number > 20:
            strays.append(abs(acceptance.probability - 0.8))
    assert sum(strays) / len(strays) < 0.045


def test_claims_of_earlier_requests_are_remembered():
    """A later request does not believe a drafter that was wrong in all others."""
    overall = Calibration()
    first = Calibration(overall)
    for _ in range(100):
        first.observe([0.9] * 4, 0)
    assert Calibration(overall).factor < 0.2
    assert Calibration().factor == pytest.approx(1.0)


def test_a_drafter_that_claims_nothing_is_believed_no_more_than_it_is_right():
    """However long it goes on, and however often it is right after all."""
    calibration = Calibration()
    for number in range(20_000):
        calibration.observe([0.0], number % 2)
    assert 0.0 < calibration.factor < 10.0


def test_claims_are_compared_with_what_came_of_them():
    """A drafter that says 0.9 and is right in half of its tokens counts for half, one that says 0.5 and is always right for more."""
    calibration = Calibration()
    assert calibration.factor == pytest.approx(1.0)
    for _ in range(100):
        calibration.observe([0.9] * 4, 1)
    assert 0.9 * calibration.factor == pytest.approx(0.5, abs=0.1)
    humble = Calibration()
    for _ in range(100):
        humble.observe([0.5] * 3, 3)
    assert 0.5 * humble.factor > 0.85


def test_a_text_that_changes_is_noticed_soon():
    """After 100 right tokens six wrong drafts tell, and after wrong ones ten right tokens of another request."""
    overall = Acceptance(0.6)
    request = Acceptance(0.6, overall)
    for _ in range(25):
        request.observe(4, 4)
    assert request.probability > 0.95
    for _ in range(6):
        request.observe(2, 0)
    assert request.probability < 0.75
    for _ in range(14):
        request.observe(2, 0)
    assert request.probability < 0.35
    for _ in range(100):
        request.observe(2, 0)
    other = Acceptance(0.6, overall)
    assert other.probability < 0.05
    for _ in range(5):
        other.observe(2, 2)
    assert other.probability > 0.8
