"""Trials are rationed by what they cost."""

from __future__ import annotations

from thermocline.speculation.trials import TrialBudget, Waiting


def count_trials(cost: float, steps: int, *, was_right: bool = False) -> int:
    """Return how many trials of this cost there are in so many steps of one second."""
    budget, waiting, found = TrialBudget(), Waiting(), 0
    for _ in range(steps):
        budget.earn(1.0, 1.0)
        if budget.allows(waiting, cost):
            found += 1
            budget.spend(0.0 if was_right else cost)
            waiting.ended(was_right=was_right)
        else:
            waiting.left_out()
    return found


def test_trials_in_vain_take_a_small_share_of_the_time():
    """However much one costs, and less and less often. One that costs more than was ever saved up is not made."""
    for cost in (0.05, 0.3, 1.0, 1.9):
        found = count_trials(cost, 1000)
        assert 1 <= found <= 7
        assert found * cost <= 0.015 * 1000
    assert count_trials(2.1, 1000) == 0


def test_what_is_saved_up_does_not_depend_on_how_long_steps_are():
    """Long steps are such with many rows: two steps with one row is the most."""
    budget = TrialBudget()
    for _ in range(100):
        budget.earn(50.0, 1.0)
    assert budget.allows(Waiting(), 2.0)
    assert not budget.allows(Waiting(), 2.1)


def test_trials_that_are_right_go_on():
    """They cost nothing: what they verified were tokens of the answer."""
    assert count_trials(1.0, 200, was_right=True) > 100


def test_a_request_whose_drafts_paid_waits_before_its_first_trial():
    """One that had none yet does not."""
    budget, waiting = TrialBudget(), Waiting()
    budget.earn(100.0, 1.0)
    assert budget.allows(waiting, 1.0)
    waiting.paid_off()
    assert not budget.allows(waiting, 1.0)
    for _ in range(16):
        waiting.left_out()
    assert budget.allows(waiting, 1.0)
