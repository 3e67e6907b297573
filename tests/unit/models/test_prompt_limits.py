"""How long a prompt's chunk may be, by what a chunk costs besides computing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from thermocline.cli.device_plan import plans_device
from thermocline.config import EngineConfig, PlacementConfig, SchedulerConfig
from thermocline.config_remote import ParallelConfig, RemoteConfig
from thermocline.experts.placement.planner import DeviceMemory
from thermocline.models.prompt_limits import prompt_limits

SPEC = SimpleNamespace(context_length=4096, latent=None, window=None)
LATENT = SimpleNamespace(
    context_length=4096, latent=SimpleNamespace(expanded_tokens=128), window=None
)
WINDOWED = SimpleNamespace(context_length=4096, latent=None, window=SimpleNamespace(num_tokens=128))


@pytest.mark.parametrize(
    ("spec", "nbytes", "on_device", "chunk", "why"),
    [
        (SPEC, 5, False, 1024, "fits in memory"),
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
    assert limits.scored_tokens == (2048 if on_device or nbytes > 10 else 512)
    asked = replace(EngineConfig(), scheduler=SchedulerConfig(prefill_chunk_tokens=77))
    assert prompt_limits(asked, spec, nbytes, 10, on_device=on_device).chunk_tokens == 77


def test_a_processor_with_tiles_takes_long_chunks():
    """Each makes tiles of all weights; where the file does not fit, that is the reason."""
    limits = prompt_limits(EngineConfig(), SPEC, 5, 10, on_tiles=True)
    assert (limits.chunk_tokens, "tiles" in limits.why_chunk) == (2048, True)
    assert limits.scored_tokens == 512, "logits of all would take a gigabyte"
    assert "reads it anew" in prompt_limits(EngineConfig(), SPEC, 11, 10, on_tiles=True).why_chunk


@pytest.mark.parametrize(
    ("settings", "nbytes", "on_device", "expected"),
    [
        ({}, 5, False, 1),
        ({}, 11, False, 4),
        ({}, 11, True, 2),
        ({}, 5, True, 2),
        ({"remote": RemoteConfig(workers=("local",))}, 11, False, 2),
        ({"scheduler": SchedulerConfig(max_prompt_chunks=3)}, 11, False, 3),
        ({"remote": RemoteConfig(workers=("local",))}, 5, False, 2),
        ({"parallel": ParallelConfig(rank=1, num_ranks=2)}, 5, False, 2),
        ({"scheduler": SchedulerConfig(max_prompt_chunks=3)}, 5, False, 3),
    ],
)
def test_a_second_chunk_is_in_flight_where_the_first_waits(settings, nbytes, on_device, expected):
    """For a disk, a device, workers or ranks; else it would only let newcomers wait."""
    limits = prompt_limits(EngineConfig(**settings), SPEC, nbytes, 10, on_device=on_device)
    assert limits.max_prompt_chunks == expected
    assert limits.why_chunks


def test_windows_keep_to_two_chunks():
    """Each further one would make every windowed layer's cache larger, of memory that the experts' pages want."""
    assert prompt_limits(EngineConfig(), WINDOWED, 11, 10).max_prompt_chunks == 2
    assert prompt_limits(EngineConfig(), WINDOWED, 5, 10).max_prompt_chunks == 1


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
