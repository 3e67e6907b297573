"""Prices of a rank, against the cost model's formula."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.models.sizes import LayerSizes
from thermocline.simulation.described_machine import other_device
from thermocline.simulation.described_ranks import describe_rank

LAYER = LayerSizes(non_expert=1000, kv_per_token=10, expert=900, layout="Q4_K")
# A byte takes a millisecond to read, a kernel or start 5 ms; 1,600 weights of 900 bytes are multiplied in 0.4 s.
SPEEDS = other_device(1e3, 4e3, 1e3, 5e-3)


def test_experts_are_read_once_or_multiplied_longer():
    """900 bytes take 0.9 s, and from the third row on longer: 0.4 s a row. Three starts are 15 ms."""
    costs = describe_rank(LAYER, SPEEDS, is_prompt=False)
    assert costs.expert_s(np.array([1, 2], np.int32)) == pytest.approx(0.9 * 2 + 0.015)
    assert costs.expert_s(np.array([1, 5], np.int32)) == pytest.approx(0.9 + 2.0 + 0.015)
    waiting = describe_rank(LAYER, SPEEDS, is_prompt=False, expert_wait_s=0.5)
    assert waiting.expert_s(np.array([1, 5], np.int32)) == pytest.approx(0.9 + 2.0 + 1.0 + 0.015)


def test_prompts_share_keys_and_values():
    """Two requests' tokens read 100 tokens' keys and values each, two of a prompt read them once."""
    each = describe_rank(LAYER, SPEEDS, is_prompt=False).attend_s(2, 100)
    assert each == pytest.approx(1.0 + 2 * 1.0 + 10 * 0.005)
    shared = describe_rank(LAYER, SPEEDS, is_prompt=True).attend_s(2, 100)
    assert shared == pytest.approx(2.0 + 10 * 0.005)
