"""Parts that bring what a device lacks: all of it, once, in slots that nobody computes with meanwhile."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermocline.experts.dispatch.stream_parts import stream_parts
from thermocline.messages import LayerIndex


@given(
    st.integers(1, 5), st.integers(1, 40), st.integers(2, 17), st.floats(0, 1), st.integers(0, 99)
)
def test_parts_bring_every_absent_expert_once_in_order(layers, experts, slots, share, seed):
    """Whatever is there: halves take turns, none is larger than its half, and a layer's are about equal."""
    rng = np.random.default_rng(seed)
    residency = np.where(rng.random((layers, experts)) < share, 1, -1).astype(np.int32)
    places = rng.permutation(100)[:slots].tolist()
    parts = stream_parts(residency, map(LayerIndex, range(layers)), places)
    assert [part.layer for part in parts] == sorted(part.layer for part in parts)
    for layer in range(layers):
        mine = [part for part in parts if part.layer == layer]
        brought = [expert for part in mine for expert in part.experts.tolist()]
        assert brought == np.flatnonzero(residency[layer] < 0).tolist()
        sizes = [len(part.experts) for part in mine]
        assert not sizes or max(sizes) - min(sizes) <= 1
    for part in parts:
        assert len(part.experts) == len(set(part.slots.tolist())) == len(part.slots) <= slots // 2
        assert set(part.slots.tolist()) <= set(places)
    for one, other in pairwise(parts):
        assert not set(one.slots.tolist()) & set(other.slots.tolist())
    for one, other in zip(parts, parts[2:], strict=False):
        few = min(len(one.slots), len(other.slots))
        assert one.slots[:few].tolist() == other.slots[:few].tolist()


def test_one_slot_is_not_enough():
    """Nothing could be copied while anything is computed."""
    with pytest.raises(AssertionError, match="one slot"):
        stream_parts(np.full((1, 2), -1, np.int32), [LayerIndex(0)], [0])
