"""Messages on the virtual clock, against times added up by hand."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.errors import ConfigError
from thermocline.simulation.exchange import Link, Links, Message

# 100 bytes take a second, a way 1, a message 0.5 of its sender, and a collective 2 until it has begun.
LINK = Link("by hand", 100.0, 1.0, 0.5, 2.0)


def nbytes(*numbers):
    return np.array(numbers, np.int64)


def test_a_collective_waits_for_the_last_rank():
    """Ready at 0 and 3: begun at 3 + 2 + one message of 0.5, then the larger of in and out, then the way."""
    links = Links(LINK, 2)
    ranks = np.arange(2)
    ends = links.collective(ranks, np.array([0.0, 3.0]), nbytes(100, 50), nbytes(50, 100))
    assert ends.tolist() == [7.5, 7.5]
    # The links are busy until 6.5, though both ranks were ready at 0.
    ends = links.collective(ranks, np.zeros(2), nbytes(0, 0), nbytes(0, 0))
    assert ends.tolist() == [10.0, 10.0]
    assert links.total_bytes == 150


def test_other_ranks_and_a_single_one_are_not_delayed():
    """A group of two leaves the third rank's link free, and a group of one takes no time."""
    links = Links(LINK, 3)
    links.collective(np.array([0, 1]), np.zeros(2), nbytes(100, 100), nbytes(100, 100))
    assert links.collective(np.array([2]), np.array([0.25]), nbytes(9), nbytes(9)).tolist() == [
        0.25
    ]
    assert links.send([Message(2, 2, 0, 0.0)]) == [1.5]


def test_messages_queue_at_their_sender_and_at_their_receiver():
    """Two from rank 0 leave one after the other; two to rank 1 come one after the other."""
    links = Links(LINK, 3)
    messages = [Message(0, 1, 100, 0.0), Message(0, 2, 100, 0.0), Message(2, 1, 100, 0.0)]
    # Sent at 0.5, 2.0 (behind the first one's bytes and its own 0.5) and 0.5; first bytes a second later.
    assert links.send(messages) == [2.5, 4.0, 3.5]
    assert links.total_bytes == 300


def test_a_message_that_comes_first_is_received_first():
    """What was listed later, but came earlier, does not wait."""
    links = Links(LINK, 3)
    assert links.send([Message(0, 1, 100, 5.0), Message(2, 1, 100, 0.0)]) == [7.5, 2.5]


@pytest.mark.parametrize("numbers", [(0.0, 1.0, 1.0, 1.0), (1.0, -1.0, 1.0, 1.0)])
def test_impossible_links(numbers):
    """A link without speed, or with a negative time, is refused."""
    with pytest.raises(ConfigError, match="speed above 0"):
        Link("none", *numbers)
