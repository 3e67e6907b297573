"""A whole layer as one job: what prefetch hears, and when, and who gives memory back."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from thermocline.messages import (
    Chunk,
    ChunkId,
    Hidden,
    LayerIndex,
    RequestId,
    Segment,
    SegmentKind,
)
from thermocline.stages.fused_layer import FusedLayerStage


class Everything:
    """Model, dispatcher, observer, lane and prefetch in one: notes what happens."""

    def __init__(self, *, is_quiet: bool) -> None:
        self.happened: list[str] = []
        self.spec = SimpleNamespace(num_layers=2)
        self._is_quiet = is_quiet

    async def run(self, _name, job, *_):
        return job()

    async def __call__(self, hidden) -> None:
        self.happened.append(f"prompt begins before {hidden.layer}")

    def on_routed(self, _chunk, layer):
        return None if self._is_quiet else partial(self.happened.append, f"routed {layer}")

    def layer(self, layer, _chunk, x, _cache, on_routed):
        if on_routed is not None:
            on_routed()
        self.happened.append(f"layer {layer}")
        return x, None

    def observe(self, *_) -> None:
        pass

    def assigned(self, *_, is_hot) -> None:
        pass

    def computed_here(self, *_) -> None:
        pass

    def give_back(self) -> None:
        self.happened.append("given back")


def chunk_of(kind: SegmentKind, *, ends: bool) -> Chunk:
    tokens = np.arange(3, dtype=np.int32)
    segment = Segment(RequestId(1), 0, 3, kind, np.zeros(1, np.int32))
    return Chunk(
        ChunkId(5), (segment,), tokens, tokens, tokens, tokens[-1:] if ends else tokens[:0]
    )


@pytest.mark.parametrize("is_quiet", [False, True], ids=["hints", "quiet"])
@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
@pytest.mark.parametrize("kind", SegmentKind)
def test_a_chunk_goes_through_its_layers(kind, ends, is_quiet):
    """A prompt is told of before its first layer; what its jobs kept is given back behind its end, if hints are wanted."""
    fake = Everything(is_quiet=is_quiet)
    stage = FusedLayerStage(fake, None, fake, fake, fake, fake, fake.give_back)
    is_prompt = kind is SegmentKind.PROMPT

    async def go() -> None:
        hidden = Hidden(chunk_of(kind, ends=ends), LayerIndex(0), np.zeros((3, 4), np.float32))
        for _ in range(2):
            hidden = await stage(hidden)

    asyncio.run(go())
    routed = [[] if is_quiet else [f"routed {layer}"] for layer in range(2)]
    assert fake.happened == [
        *(["prompt begins before 0"] if is_prompt else []),
        *routed[0],
        "layer 0",
        *routed[1],
        "layer 1",
        *(["given back"] if is_prompt and ends and not is_quiet else []),
    ]
