"""What a part of a layer takes of streams that are weighed and mixed as wholes, in every implementation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.kernel_cases import DENSE_ISAS
from tests.unit.kernels.test_dense import dense  # noqa: F401 - a fixture
from thermocline.kernels import _native
from thermocline.kernels.dense import NativeDense
from thermocline.kernels.dense_contract import BalanceRule
from thermocline.kernels.dense_reference import ReferenceDense

COUNTS = [2, 3, 4, 16]


def case(count: int, width: int, tokens: int, rounds: int = 20, floor: float = 1e-6):
    """Return streams, logits and a rule."""
    rng = np.random.default_rng((count, width, tokens))
    rows = (2 + count) * count
    x = rng.standard_normal((tokens, count * width)).astype(np.float32)
    logits = (3 * rng.standard_normal((tokens, rows))).astype(np.float32)
    base, scales = rng.standard_normal(rows), rng.uniform(0.5, 1.5, 3)
    return x, logits, BalanceRule(base.astype(np.float32), scales.astype(np.float32), floor, rounds)


def by_definition(x: np.ndarray, logits: np.ndarray, rule: BalanceRule, count: int):
    """Return what is taken of one token's streams, what is left and the shares, number by number in double."""
    scales = [rule.scales[0]] * count + [rule.scales[1]] * count
    scales += [rule.scales[2]] * count * count
    given = [
        float(a) * float(b) + float(c) for a, b, c in zip(logits, scales, rule.base, strict=True)
    ]
    sigmoids = [1 / (1 + np.exp(-each)) for each in given[: 2 * count]]
    weights = [each + rule.floor for each in sigmoids[:count]]
    shares = [2 * each for each in sigmoids[count:]]
    members = range(count)
    powers = [[np.exp(given[(2 + i) * count + j]) for j in members] for i in members]
    m = [[power / sum(row) + rule.floor for power in row] for row in powers]
    for turn in range(2 * rule.rounds - 1):
        rows = [sum(m[i]) + rule.floor for i in members]
        columns = [sum(m[i][j] for i in members) + rule.floor for j in members]
        m = [[m[i][j] / (rows[i] if turn % 2 else columns[j]) for j in members] for i in members]
    streams = x.astype(np.float64).reshape(count, -1)
    taken = sum(weights[i] * streams[i] for i in members)
    rest = [sum(m[i][j] * streams[i] for i in members) for j in members]
    return taken, np.concatenate(rest), np.array(shares)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("width", "rounds"), [(1, 1), (37, 1), (37, 20), (129, 2)])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_streams_are_weighed_and_mixed(dense, count, width, rounds, tokens):  # noqa: F811
    """Weights, shares and the balanced matrix as they are defined; inputs stay, and each token is treated by itself."""
    x, logits, rule = case(count, width, tokens, rounds, floor=1e-3)
    assert rule.streams == count
    kept = x.copy(), logits.copy()
    found = dense.take_streams(x, logits, rule)
    shapes = (tokens, width), (tokens, count * width), (tokens, count)
    assert tuple(each.shape for each in found) == shapes
    assert {each.dtype for each in found} == {np.dtype(np.float32)}
    for before, after in zip(kept, (x, logits), strict=True):
        np.testing.assert_array_equal(before, after)
    for t in range(tokens):
        expected = by_definition(x[t], logits[t], rule, count)
        for ours, theirs in zip(found, expected, strict=True):
            assert_within(ours[t], theirs, "product/float32")
        alone = dense.take_streams(x[t : t + 1], logits[t : t + 1], rule)
        for one, all_of_them in zip(alone, found, strict=True):
            np.testing.assert_array_equal(one[0], all_of_them[t])


@pytest.mark.parametrize("isa", DENSE_ISAS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rounds", [1, 20])
def test_sets_agree_with_the_reference(guarded, isa, count, rounds):
    """Of 300 tokens, to float32's precision; and nothing is written outside of the outputs."""
    x, logits, rule = case(count, 61, 300, rounds)
    expected = ReferenceDense().take_streams(x, logits, rule)
    for ours, theirs in zip(
        NativeDense(_native.Core(isa, 2)).take_streams(x, logits, rule), expected, strict=True
    ):
        assert_within(ours, theirs, "product/float32")


@pytest.mark.parametrize("isa", DENSE_ISAS)
@pytest.mark.parametrize("count", COUNTS)
def test_threads_and_chunks_change_no_bit(isa, count):
    """One thread or three, and 300 tokens at once or by sevens."""
    x, logits, rule = case(count, 517, 300)
    one, three = (NativeDense(_native.Core(isa, threads)) for threads in (1, 3))
    found = one.take_streams(x, logits, rule)
    parts = [
        three.take_streams(x[start : start + 7], logits[start : start + 7], rule)
        for start in range(0, 300, 7)
    ]
    chunks = [np.concatenate(each) for each in zip(*parts, strict=True)]
    for others in (three.take_streams(x, logits, rule), chunks):
        for expected, other in zip(found, others, strict=True):
            np.testing.assert_array_equal(expected, other)


@pytest.mark.parametrize("count", COUNTS)
def test_rounds_balance_the_matrix(dense, count):  # noqa: F811
    """Of streams that are the same everywhere, as much is left of each: rows and columns have sums near one."""
    _, logits, rule = case(count, 5, 9)
    rule = replace(rule, scales=np.float32(0.2) * rule.scales)
    columns = dense.take_streams(np.ones((9, count * 5), np.float32), logits, rule)[1]
    np.testing.assert_allclose(columns, 1.0, atol=1e-4)
    # Stream i alone in column i: what is left of all streams is row i of the matrix.
    own = np.tile(np.eye(count, dtype=np.float32).ravel(), (9, 1))
    matrix = dense.take_streams(own, logits, rule)[1].reshape(9, count, count)
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, atol=1e-4)
    assert (matrix > 0).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_with_its_token(dense, count, bad):  # noqa: F811
    """In streams and in logits; other tokens keep their bits."""
    x, logits, rule = case(count, 37, 4)
    before = dense.take_streams(x, logits, rule)
    x[0, 5] = bad
    logits[1, 2 * count + 1] = bad
    logits[2, 0] = bad
    after = dense.take_streams(x, logits, rule)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[3], new[3])
    assert not np.isfinite(after[0][0, 5])
    assert not np.isfinite(after[1][0, 5::37]).any()
    assert np.isfinite(after[1][0, 6:37]).all()
    if bad != -np.inf:
        assert np.isnan(after[1][1]).all()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_extreme_logits_have_finite_results(dense):  # noqa: F811
    """Logits far beyond what a power can hold weigh with 0, 1 and the floor."""
    x, logits, rule = case(4, 37, 5)
    found = dense.take_streams(x, np.float32(300) * logits, rule)
    assert all(np.isfinite(each).all() for each in found)


@pytest.mark.parametrize("isa", DENSE_ISAS)
def test_wrong_shapes_are_refused(isa):
    """Whatever does not fit the rule's count of streams, and a count or rounds out of range."""
    native = NativeDense(_native.Core(isa, 2))
    x, logits, rule = case(4, 6, 3)
    odd = np.zeros(25, np.float32)
    for given in (
        (x[:, :-1].copy(), logits, rule),
        (x[:2], logits, rule),
        (x, logits[:, :-1].copy(), rule),
        (x, logits[:2], rule),
        (x, logits, replace(rule, base=odd)),
        (x, logits, replace(rule, scales=odd[:2])),
    ):
        with pytest.raises(ValueError, match="must"):
            native.take_streams(*given)
    with pytest.raises(ValueError, match="round"):
        native.take_streams(x, logits, replace(rule, rounds=0))
    for count in (1, 17):
        with pytest.raises(ValueError, match="2 to 16 streams"):
            native.take_streams(*case(count, 2, 3))


@pytest.mark.parametrize("name", ["taken", "rest", "shares"])
def test_outputs_of_wrong_shapes_are_refused(name):
    """The core writes to nothing that has not a row per token."""
    x, logits, rule = case(4, 6, 3)
    outputs = {
        "taken": np.empty((3, 6), np.float32),
        "rest": np.empty((3, 24), np.float32),
        "shares": np.empty((3, 4), np.float32),
    }
    outputs[name] = outputs[name][:2]
    with pytest.raises(ValueError, match=r"row per token|one shape"):
        _native.Core("portable", 1).take_streams(
            x, logits, rule.base, rule.scales, rule.floor, rule.rounds, **outputs
        )
