"""How long a prompt's chunk may be, by what a chunk costs besides computing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from thermocline.cli.device_plan import plans_device
from thermocline.config import EngineConfig, PlacementConfig, SchedulerConfig
from thermocline.experts.placement.planner import DeviceMemory
from thermocline.models.prompt_limits import prompt_limits

SPEC = SimpleNamespace(context_length=4096, latent=None)
LATENT = SimpleNamespace(context_length=4096, latent=SimpleNamespace(expanded_tokens=128))


@pytest.mark.parametrize(
    ("spec", "nbytes", "on_device", "chunk", "why"),
    [
        (SPEC, 5, False, 512, "fits in memory"),
        (SPEC, 11, False, 2048, "reads it anew"),
        (LATENT, 5, False, 2048, "latent"),
        (SPEC, 5, True, 2048, "a GPU"),
    ],
)
def test_long_chunks_where_each_costs_something_besides(spec, nbytes, on_device, chunk, why):
    """And what was asked for in any case."""
    limits = prompt_limits(EngineConfig(), spec, nbytes, 10, on_device=on_device)
    assert limits.chunk_tokens == chunk
    assert why in limits.why_chunk
    asked = replace(EngineConfig(), scheduler=SchedulerConfig(prefill_chunk_tokens=77))
    assert prompt_limits(asked, spec, nbytes, 10, on_device=on_device).chunk_tokens == 77


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({}, True),
        ({"cpu_moe": True}, True),
        ({"trunk_device": "cpu"}, True),
        ({"trunk_device": "cpu", "hot_device": "none"}, False),
        ({"gpu_layers": 0, "cpu_moe": True}, False),
        ({"trunk_device": "torch-cpu", "hot_device": "torch-cpu"}, True),
    ],
)
def test_a_plan_knows_whether_a_gpu_computes(placement, expected):
    """As the engine does; nothing is on a GPU that is not there."""
    config = PlacementConfig(**placement)
    assert plans_device(config, DeviceMemory(8 << 30, 8 << 30)) == expected
    assert not plans_device(config, DeviceMemory(0, 0))
