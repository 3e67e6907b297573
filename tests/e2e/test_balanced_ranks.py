"""Experts placed by the use that an engine saw are balanced for text that it has not seen."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline import Engine, EngineConfig
from thermocline.config import HeatConfig
from thermocline.demo import DEMO_HELD_TEXT_PATH, DEMO_MODEL_PATH
from thermocline.experts.heat_file import read_heat
from thermocline.messages import RequestOptions
from thermocline.parallel.balance import Balanced, RankLayout, balance, imbalance
from thermocline.sampling.params import SamplingParams


async def routing_of(text: str, heat_file) -> np.ndarray:
    """Return the choices of each layer's experts, float64 [layers, experts]; heat_file gets them too."""
    config = EngineConfig(heat=HeatConfig(file=str(heat_file)))
    async with Engine.open(DEMO_MODEL_PATH, config) as engine:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        options = RequestOptions(wants_routing=True)
        events = [
            event async for event in engine.events(engine.tokenizer.encode(text), params, options)
        ]
        chosen = events[-1].routing
    assert chosen is not None
    layers = range(chosen.shape[1])
    return np.array([np.bincount(chosen[:, n].ravel(), minlength=16) for n in layers], np.float64)


@pytest.mark.slow
async def test_the_demo_models_ranks(tmp_path):
    """The most loaded rank has at most 1.15 of the mean, in total of the layers, on the text after the one that was
    counted; on the counted one itself in each layer. A linear map has 1.2 and more in each of four ranks' layers.
    """
    text = DEMO_HELD_TEXT_PATH.read_text()
    half = text.index("\n", len(text) // 2)
    counted = await routing_of(text[:half], tmp_path / "heat.json")
    later = await routing_of(text[half:], tmp_path / "other.json")
    _, record = read_heat(tmp_path / "heat.json")
    num_layers, num_experts = record.warmth.shape
    for num_ranks, num_slots in ((2, 16), (4, 16), (4, 20), (8, 24)):
        placed = balance(record.warmth, RankLayout(num_slots, num_ranks))
        assert imbalance(placed.rank_loads(counted)).max() <= 1.15, (num_ranks, num_slots)
        total = placed.rank_loads(later).sum(axis=0, keepdims=True)
        assert imbalance(total).item() <= 1.15, (num_ranks, num_slots)
    neighbours = np.tile(np.arange(num_experts).reshape(4, -1), (num_layers, 1, 1))
    linear = Balanced(neighbours.astype(np.int32))
    assert imbalance(linear.rank_loads(counted)).min() > 1.15
