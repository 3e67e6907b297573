"""Inputs of layers, kept from a chunk's way through them to its end."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.messages import Hidden, LayerIndex, SegmentKind
from thermocline.models.lone_sequence import lone_chunk
from thermocline.speculation.layer_tap import LayerTap
from thermocline.stages.tapped import TappedStage

BLOCKS = np.arange(2, dtype=np.int32)


def hidden(layer: int) -> Hidden:
    chunk = lone_chunk(3, SegmentKind.PROMPT, BLOCKS)
    return Hidden(chunk, LayerIndex(layer), np.full((3, 4), layer, np.float32))


async def test_wanted_layers_are_kept_until_the_chunk_ends():
    """Others are not, and nothing is left of a chunk that has ended, however it did."""
    tap, seen = LayerTap([LayerIndex(1), LayerIndex(3)]), []

    async def stage(message: Hidden) -> Hidden:
        seen.append(message.layer)
        if message.layer == 4:
            raise ValueError("it fails")
        return message

    tapped = TappedStage(stage, tap)
    for layer in range(4):
        await tapped(hidden(layer))
    with pytest.raises(ValueError, match="it fails"):
        await tapped(hidden(4))
    assert seen == [0, 1, 2, 3, 4]
    chunk = hidden(0).chunk.id
    found = tap.inputs(chunk)
    assert {int(layer): float(x[0, 0]) for layer, x in found.items()} == {1: 1.0, 3: 3.0}
    tap.forget(chunk)
    tap.forget(chunk)
    assert not tap.inputs(chunk)
    assert repr(tap) == "LayerTap(layers [1, 3], 0 chunks)"
