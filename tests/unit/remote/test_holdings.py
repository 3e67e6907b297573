"""What a worker holds: the fingerprint names exactly what parent and worker must agree on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from thermocline.models.router_rule import RouterRule
from thermocline.models.spec import ModelSpec
from thermocline.remote.holdings import held_fingerprint

SPEC = ModelSpec(
    architecture="qwen3moe",
    name="x",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    context_length=128,
    rope_base=1e4,
    rms_epsilon=1e-6,
    expert_intermediate_size=32,
    router=RouterRule(8, 2, normalize_top_k=True),
)


def test_the_fingerprint_sees_dims_ids_and_their_order():
    """Anything that would make local ids or shapes differ gives another fingerprint; types of ids do not."""
    base = ((0, 1), (2,))
    fingerprints = {
        held_fingerprint(SPEC, base),
        held_fingerprint(SPEC, ((1, 0), (2,))),
        held_fingerprint(SPEC, ((0, 1, 2), ())),
        held_fingerprint(SPEC, ((0,), (1, 2))),
        held_fingerprint(replace(SPEC, hidden_size=128), base),
        held_fingerprint(replace(SPEC, expert_intermediate_size=64), base),
    }
    assert len(fingerprints) == 6
    assert held_fingerprint(SPEC, [np.array([0, 1], np.int32), [2]]) in fingerprints
    assert held_fingerprint(replace(SPEC, name="renamed"), base) in fingerprints
