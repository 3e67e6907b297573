"""Which layers a number of layers means."""

from __future__ import annotations

import pytest

from thermocline.models.device.part import DevicePart


@pytest.mark.parametrize("count", range(8))
def test_layers_count_from_the_end_with_the_head_as_the_last(count):
    """llama.cpp's rule: index `num_layers` is the head, and all indices from num_layers + 1 - count on are on the GPU."""
    num_layers = 5
    first = max(num_layers + 1 - count, 0)
    found = DevicePart.last(num_layers, count)
    assert found.layers == tuple(n for n in range(num_layers) if n >= first)
    assert found.has_head == (num_layers >= first)
    assert found.is_empty == (count == 0)
    assert found.is_whole == (count > num_layers) == (found == DevicePart.whole(num_layers))


def test_a_part_says_what_it_is():
    """As plans and errors name it."""
    names = [str(DevicePart.last(2, count)) for count in (1, 2, 3)]
    some = "non-expert weights of 1 of 2 layers"
    assert names == ["the head", f"{some} and the head", "the whole trunk"]
    assert str(DevicePart(2, (0,))) == some
