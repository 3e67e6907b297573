"""Claims about each logit processor and filter, against definitions written out in plain Python."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from thermocline.sampling import logits as maths

_EXAMPLES = settings(max_examples=50, derandomize=True, deadline=None)
# Few distinct values, so that ties happen in most examples; -inf is a token the model rules out.
_VALUES = st.sampled_from([-3.0, -1.5, 0.0, 0.5, 1.0, 2.5]) | st.floats(-8, 8, width=32)
_ROWS = (
    st.lists(_VALUES | st.just(-math.inf), min_size=1, max_size=24)
    .filter(lambda row: max(row) > -math.inf)
    .map(lambda row: np.array(row, dtype=np.float32))
)
_SHARES = st.floats(0.01, 0.99)


def _probabilities(row, token_ids=None):
    """Return {token: probability} of the softmax over `token_ids` (all if None)."""
    token_ids = range(len(row)) if token_ids is None else token_ids
    greatest = max(float(row[i]) for i in token_ids)
    weights = {i: math.exp(float(row[i]) - greatest) for i in token_ids}
    total = math.fsum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


def _shortest_prefix(order, probabilities, share):
    """Return, as a sorted list, the shortest prefix of `order` that holds `share`; skip near ties."""
    held, kept = 0.0, []
    for token_id in order:
        if held >= share:
            break
        kept.append(token_id)
        held += probabilities[token_id]
        assume(abs(held - share) > 1e-9)
    return sorted(kept)


def _naive_top_k(row, k):
    return sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])


def _naive_top_p(row, top_p):
    probabilities = _probabilities(row)
    order = sorted(probabilities, key=lambda i: (-row[i], i))
    return _shortest_prefix(order, probabilities, top_p)


def _naive_typical_p(row, typical_p):
    probabilities = {i: p for i, p in _probabilities(row).items() if p > 0}
    entropy = -math.fsum(p * math.log(p) for p in probabilities.values())
    strangeness = {i: abs(-math.log(p) - entropy) for i, p in probabilities.items()}
    for i, a in strangeness.items():  # distances that only rounding tells apart have no order
        assume(all(row[i] == row[j] or abs(a - b) > 1e-9 for j, b in strangeness.items()))
    order = sorted(probabilities, key=lambda i: (strangeness[i], i))
    return _shortest_prefix(order, probabilities, typical_p)


def _assert_candidates(candidates, token_ids, row, temperature=1.0):
    """The candidates are exactly `token_ids`, scored by the row, the greatest score being 0."""
    assert candidates.token_ids.tolist() == token_ids
    assert candidates.scores.dtype == np.float64
    greatest = max(float(row[i]) for i in token_ids)
    expected = [(float(row[i]) - greatest) / temperature for i in token_ids]
    np.testing.assert_allclose(candidates.scores, expected, rtol=1e-12, atol=1e-12)
    assert candidates.scores.max() == 0


@_EXAMPLES
@given(row=_ROWS, top_k=st.integers(0, 30), temperature=st.floats(0.05, 2.0))
def test_top_k_keeps_the_k_most_likely(row, top_k, temperature):
    """Top-k keeps k tokens, the lower id among equals; 0 and more than V keep all; scores are tempered."""
    candidates = maths.candidates_at(row, temperature, top_k=top_k)
    _assert_candidates(candidates, _naive_top_k(row, top_k or len(row)), row, temperature)


@_EXAMPLES
@given(row=_ROWS, top_p=_SHARES)
def test_top_p_keeps_the_smallest_set_that_holds_p(row, top_p):
    """Top-p is the shortest prefix of the falling order whose share reaches p."""
    candidates = maths.keep_top_p(maths.candidates_at(row, 1.0), top_p)
    _assert_candidates(candidates, _naive_top_p(row, top_p), row)


@_EXAMPLES
@given(row=_ROWS, typical_p=_SHARES)
def test_typical_p_keeps_the_tokens_of_typical_surprise(row, typical_p):
    """Typical-p is the shortest prefix of the order by distance from the entropy whose share reaches p."""
    candidates = maths.keep_typical_p(maths.candidates_at(row, 1.0), typical_p)
    _assert_candidates(candidates, _naive_typical_p(row, typical_p), row)


@_EXAMPLES
@given(row=_ROWS, min_p=_SHARES)
def test_min_p_keeps_what_is_likely_next_to_the_best(row, min_p):
    """Min-p keeps exactly the tokens of at least that share of the greatest probability."""
    probabilities = _probabilities(row)
    best = max(probabilities.values())
    assume(all(abs(p / best - min_p) > 1e-9 for p in probabilities.values()))
    candidates = maths.keep_min_p(maths.candidates_at(row, 1.0), min_p)
    _assert_candidates(candidates, [i for i, p in probabilities.items() if p >= min_p * best], row)


@pytest.mark.parametrize("share", [1e-12, 1e-300])
def test_a_tiny_share_keeps_one_token(share):
    """However small the share, one token is left: the best, or the most typical."""
    row = np.array([0.0, 3.0, 1.0, 3.0], dtype=np.float32)
    everything = maths.candidates_at(row, 1.0)
    assert maths.keep_top_p(everything, share).token_ids.tolist() == [1]
    assert len(maths.keep_typical_p(everything, share).token_ids) == 1
    assert maths.keep_min_p(everything, 1.0).token_ids.tolist() == [1, 3]


def test_filters_agree_with_a_full_sort_on_a_large_vocabulary():
    """The shortcuts for large rows (partitions, floors) keep what a full sort keeps, ties included."""
    rng = np.random.default_rng(5)
    for scale in (0.01, 1.0, 3.0):
        row = np.round(rng.normal(0, scale, 20_011), 2).astype(np.float32)
        everything = maths.candidates_at(row, 0.8)
        order = np.argsort(-row, kind="stable")
        probabilities = np.exp(everything.scores) / np.exp(everything.scores).sum()

        top_k = maths.candidates_at(row, 0.8, top_k=777).token_ids
        np.testing.assert_array_equal(top_k, np.sort(order[:777]))

        needed = int(np.searchsorted(np.cumsum(probabilities[order]), 0.9)) + 1
        np.testing.assert_array_equal(
            maths.keep_top_p(everything, 0.9).token_ids, np.sort(order[:needed])
        )

        surprise = -np.log(probabilities)
        strangeness = np.abs(surprise - probabilities @ surprise)
        typical = np.argsort(np.round(strangeness, 9), kind="stable")
        needed = int(np.searchsorted(np.cumsum(probabilities[typical]), 0.3)) + 1
        kept = maths.keep_typical_p(everything, 0.3).token_ids
        assert len(np.setxor1d(kept, typical[:needed])) <= 2  # ties that rounding alone breaks


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
def test_coldest_temperatures_leave_the_winner(temperature):
    """A temperature next to 0 overflows nowhere: the winners keep score 0 and only they can be drawn."""
    row = np.array([1.0, 2.0, -50.0, 2.0, -np.inf], dtype=np.float32)
    candidates = maths.candidates_at(row, temperature)
    assert np.exp(candidates.scores).tolist() == [0, 1, 0, 1, 0]
    assert {maths.draw(candidates, u) for u in (0.0, 0.49, 0.5, 0.99)} == {1, 3}


def test_draw_inverts_the_cumulative_distribution():
    """Uniform u picks the first token whose cumulative probability is above u; ends never pick p = 0."""
    scores = np.array([-np.inf, 0.0, -math.log(2), -math.log(2), -np.inf])
    candidates = maths.Candidates(np.array([2, 5, 6, 9, 11]), scores)
    picks = [maths.draw(candidates, u) for u in (0.0, 0.49999, 0.5, 0.74999, 0.75, 1 - 2**-53)]
    assert picks == [5, 5, 6, 6, 9, 9]


def test_draw_never_takes_an_impossible_last_token():
    """If rounding carries u to the very end, the last possible token is drawn, not one of weight 0."""
    candidates = maths.Candidates(np.array([0, 1, 2]), np.array([0.0, -1.0, -np.inf]))
    assert maths.draw(candidates, 1.0) == 1


def test_bias_is_added_to_the_named_tokens():
    """Bias changes the logits it names and no other."""
    row = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    maths.add_bias(row, np.array([2, 0]), np.array([-100.0, 0.5], dtype=np.float32))
    assert row.tolist() == [1.5, 2.0, -97.0]


def test_repetition_divides_positive_and_multiplies_negative_logits_once():
    """A token that is in the window twice is penalised once; one of logit 0 stays 0."""
    row = np.array([4.0, -4.0, 0.0, 8.0, -8.0], dtype=np.float32)
    maths.penalise_repetition(row, np.array([0, 1, 1, 2, 0]), 2.0)
    assert row.tolist() == [2.0, -8.0, 0.0, 8.0, -8.0]


def test_empty_window_penalises_nothing():
    """Without a token in the window the row stays as it is."""
    row = np.array([4.0, -4.0], dtype=np.float32)
    maths.penalise_repetition(row, np.array([], dtype=np.int64), 2.0)
    assert row.tolist() == [4.0, -4.0]


def test_presence_counts_once_and_frequency_each_time():
    """A token three times in the output loses presence + 3 * frequency."""
    row = np.zeros(4, dtype=np.float32)
    maths.penalise_output(row, [3, 1, 3, 3], presence=0.5, frequency=0.25)
    assert row.tolist() == [0.0, -0.75, 0.0, -1.25]
    maths.penalise_output(row, (0,), presence=-1.0, frequency=0.0)
    assert row[0] == 1.0


def test_forbidding_the_last_possible_tokens_changes_nothing():
    """Tokens become impossible, except if nothing else would be possible."""
    row = np.array([1.0, 2.0, -np.inf], dtype=np.float32)
    maths.forbid(row, np.array([1]))
    assert row.tolist() == [1.0, -np.inf, -np.inf]
    maths.forbid(row, np.array([0, 2]))
    assert row.tolist() == [1.0, -np.inf, -np.inf]


@_EXAMPLES
@given(row=_ROWS)
def test_log_normaliser_makes_probabilities_sum_to_one(row):
    """exp(logits - normaliser) is the softmax."""
    normaliser = maths.log_normaliser(row)
    expected = list(_probabilities(row).values())
    np.testing.assert_allclose(np.exp(row.astype(np.float64) - normaliser), expected, rtol=1e-6)


def test_log_normaliser_survives_large_logits():
    """Logits near the float32 limits neither overflow nor vanish."""
    for offset in (-3e38, 3e38):
        row = np.full(4, offset, dtype=np.float32)
        assert maths.log_normaliser(row) == pytest.approx(float(row[0]))


@_EXAMPLES
@given(row=_ROWS, count=st.integers(0, 30))
def test_most_likely_is_the_head_of_the_falling_order(row, count):
    """The k best by falling logit, the lower id first among equals, without impossible ones."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    expected = [i for i in order if row[i] > -math.inf][:count]
    assert maths.most_likely(row, count).tolist() == expected
