"""Rows that are pooled number by number, by a softmax of their gates, in every implementation."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.kernel_cases import DENSE_ISAS
from tests.unit.kernels.test_dense import dense  # noqa: F401 - a fixture
from thermocline.kernels import _native
from thermocline.kernels.dense import NativeDense
from thermocline.kernels.dense_reference import ReferenceDense


def case(n: int, count: int, width: int, scale: float = 2.0):
    """Return rows, gates and places."""
    rng = np.random.default_rng((n, count, width))
    rows, gates = (rng.standard_normal((n, count, width)).astype(np.float32) for _ in range(2))
    places = rng.standard_normal((count, width)).astype(np.float32)
    return rows, np.float32(scale) * gates, places


# Of the same numbers for every implementation: it takes longer than all of them.
_known: dict[tuple[int, ...], np.ndarray] = {}


def by_definition(rows: np.ndarray, gates: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return what one entry gives, number by number in double."""
    count, width = rows.shape
    out = np.empty(width)
    for number in range(width):
        logits = [float(gates[r, number]) + float(places[r, number]) for r in range(count)]
        powers = [np.exp(each - max(logits)) for each in logits]
        out[number] = sum(
            power / sum(powers) * float(row)
            for power, row in zip(powers, rows[:, number], strict=True)
        )
    return out


@pytest.mark.parametrize("count", [1, 2, 8, 128])
@pytest.mark.parametrize("width", [1, 16, 37, 64, 131])
def test_rows_are_weighed_by_their_gates(dense, count, width):  # noqa: F811
    """A softmax of each number by itself; inputs stay, and each entry is treated by itself."""
    for n in (0, 1, 3):
        given = case(n, count, width)
        kept = [each.copy() for each in given]
        found = dense.pool_rows(*given)
        assert found.shape == (n, width)
        assert found.dtype == np.float32
        for before, after in zip(kept, given, strict=True):
            np.testing.assert_array_equal(before, after)
        rows, gates, places = given
        for entry in range(n):
            key = n, count, width, entry
            if key not in _known:
                _known[key] = by_definition(rows[entry], gates[entry], places)
            assert_within(found[entry], _known[key], "product/float32")
            alone = dense.pool_rows(rows[entry : entry + 1], gates[entry : entry + 1], places)
            np.testing.assert_array_equal(alone[0], found[entry])


@pytest.mark.parametrize("isa", DENSE_ISAS)
@pytest.mark.parametrize(("n", "count", "width"), [(300, 8, 512), (40, 8, 128), (9, 128, 512)])
def test_sets_agree_with_the_reference(guarded, isa, n, count, width):
    """To float32's precision; and nothing is written outside of the output."""
    given = case(n, count, width)
    found = NativeDense(_native.Core(isa, 2)).pool_rows(*given)
    assert_within(found, ReferenceDense().pool_rows(*given), "product/float32")


@pytest.mark.parametrize("isa", DENSE_ISAS)
@pytest.mark.parametrize(("count", "width"), [(8, 512), (8, 131), (128, 512), (128, 77)])
def test_threads_and_neighbours_change_no_bit(isa, count, width):
    """One thread or three, all at once or one after the other, and columns by themselves."""
    rows, gates, places = case(60, count, width)
    one, three = (NativeDense(_native.Core(isa, threads)) for threads in (1, 3))
    found = one.pool_rows(rows, gates, places)
    np.testing.assert_array_equal(three.pool_rows(rows, gates, places), found)
    for entry in (0, 31, 59):
        part = slice(entry, entry + 1)
        alone = three.pool_rows(rows[part], gates[part], places)
        np.testing.assert_array_equal(alone[0], found[entry])
    for part in (slice(5, 76), slice(width - 1, width), slice(3, 4)):
        cut = [np.ascontiguousarray(each[..., part]) for each in (rows, gates, places)]
        np.testing.assert_array_equal(one.pool_rows(*cut), found[:, part])


@pytest.mark.parametrize("count", [2, 8, 128])
def test_gates_of_minus_infinity_weigh_nothing(dense, count):  # noqa: F811
    """Their rows are left out, the first one's and all but one's among them."""
    rows, gates, places = case(3, count, 37)
    gates[0, 0] = gates[1, count // 2 :, 5] = gates[2, :-1] = -np.inf
    found = dense.pool_rows(rows, gates, places)
    np.testing.assert_array_equal(found[2], rows[2, -1])
    short = [each[:1, 1:].copy() for each in (rows, gates)]
    np.testing.assert_array_equal(found[:1], dense.pool_rows(*short, places[1:].copy()))
    for entry in range(3):
        assert_within(
            found[entry], by_definition(rows[entry], gates[entry], places), "product/float32"
        )


def test_gates_far_apart_leave_the_best(dense):  # noqa: F811
    """Gates beyond what a power can hold: the best row is taken as it is."""
    rows, gates, places = case(2, 8, 37)
    gates[0, 3], gates[1, 6] = 3e4, -3e4
    found = dense.pool_rows(rows, gates, places)
    np.testing.assert_array_equal(found[0], rows[0, 3])
    assert np.isfinite(found).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_with_its_number(dense, bad):  # noqa: F811
    """Of rows and of gates; all other numbers keep their bits."""
    rows, gates, places = case(3, 8, 37)
    before = dense.pool_rows(rows, gates, places)
    rows[0, 2, 5] = bad
    gates[1, 4, 36] = bad
    after = dense.pool_rows(rows, gates, places)
    assert not np.isfinite(after[[0, 1], [5, 36]]).any()
    after[[0, 1], [5, 36]] = before[[0, 1], [5, 36]]
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("isa", DENSE_ISAS)
def test_wrong_shapes_are_refused(isa):
    """Whatever does not fit the rows, and no row at all."""
    native = NativeDense(_native.Core(isa, 2))
    rows, gates, places = case(3, 4, 6)
    for given in (
        (rows, gates[:2], places),
        (rows, gates[:, :3].copy(), places),
        (rows, gates[..., :5].copy(), places),
        (rows, gates, places[:3]),
        (rows, gates, places[:, :5].copy()),
        (rows[:, :0].copy(), gates[:, :0].copy(), places[:0]),
    ):
        with pytest.raises(ValueError, match="must"):
            native.pool_rows(*given)
    with pytest.raises(ValueError, match="out must be"):
        _native.Core(isa, 1).pool_rows(rows, gates, places, np.empty((2, 6), np.float32))
