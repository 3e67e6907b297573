"""The comparison of what two readers got, one of them late."""

from __future__ import annotations

import pytest

from tests.support.same_events import are_same, begin_same
from thermocline.messages import FinishReason, TokenEvent

ONE_BY_ONE = [
    TokenEvent(0, (1,), "a"),
    TokenEvent(0, (2,), ""),
    TokenEvent(0, (3,), "bc"),
    TokenEvent(0, (4,), "d", finish_reason=FinishReason.LENGTH),
]
LATE = [
    TokenEvent(0, (1,), "a"),
    TokenEvent(0, (2, 3, 4), "bcd", finish_reason=FinishReason.LENGTH),
]
END_APART = [
    *ONE_BY_ONE[:3],
    TokenEvent(0, (4,), "d"),
    TokenEvent(0, (), "", finish_reason=FinishReason.LENGTH),
]


@pytest.mark.parametrize("read", [ONE_BY_ONE, LATE, END_APART], ids=["one by one", "late", "end"])
def test_a_late_reader_reads_the_same(read):
    """Several tokens in one event are those tokens."""
    assert are_same(read, ONE_BY_ONE)
    assert are_same(ONE_BY_ONE, read)


@pytest.mark.parametrize(
    "read",
    [
        [],
        LATE[:1],
        [LATE[0], TokenEvent(0, (2, 3, 5), "bcd", finish_reason=FinishReason.LENGTH)],
        [LATE[0], TokenEvent(0, (2, 3, 4), "bce", finish_reason=FinishReason.LENGTH)],
        [LATE[0], TokenEvent(0, (2, 3, 4), "bcd", finish_reason=FinishReason.STOP)],
        [TokenEvent(0, (1, 2), "ab"), *ONE_BY_ONE[2:]],
    ],
    ids=["nothing", "less", "token", "text", "reason", "text earlier"],
)
def test_any_difference_is_one(read):
    """Of tokens, text, when the text came, and the end."""
    assert not are_same(read, ONE_BY_ONE)


def test_a_reader_that_left_read_the_beginning():
    """What it got is compared, as far as both have an event that ends there."""
    assert begin_same(ONE_BY_ONE[:3], ONE_BY_ONE)
    assert begin_same([TokenEvent(0, (1, 2), "a")], ONE_BY_ONE)
    assert not begin_same([TokenEvent(0, (1, 5), "a")], ONE_BY_ONE)
    assert not begin_same([TokenEvent(0, (1, 2), "ab")], ONE_BY_ONE)
