"""Ranks whose experts are on a device: the answers of one process, whatever has room there.

Ranks are threads here, with groups in memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.e2e.test_divided_ranks import COUNTS, answers, config_of
from tests.support.arch_cases import ARCH_CASES
from tests.support.compare import assert_within
from tests.support.thread_ranks import ThreadWorld, followed
from tests.support.toy_archs import write_toy_arch
from thermocline.config import PlacementConfig
from thermocline.engine.api import Engine
from thermocline.errors import ConfigError, DeviceMemoryError
from thermocline.parallel.rank_experts import RankExperts

pytestmark = pytest.mark.slow

TOY = ARCH_CASES[0].toy


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a toy's file, and its answers in one process."""
    path = tmp_path_factory.mktemp("ranks with devices") / "toy.gguf"
    write_toy_arch(path, TOY)
    alone = replace(config_of(1, 1), parallel=type(config_of(1, 1).parallel)())
    return path, asyncio.run(answers(path, alone))


def on_device(config, kind: str, memory_bytes: int | None = None, **more: object):
    """Return the config with experts on a device of so much memory."""
    placement = PlacementConfig(
        hot_device=kind, trunk_device="cpu", device_memory_bytes=memory_bytes, **more
    )
    return replace(config, placement=placement)


@pytest.fixture
def computed(monkeypatch):
    """Return how many experts each rank has on its device, in the order in which layers were computed."""
    found: list[int] = []
    original = RankExperts.outputs

    def outputs(self, layer, work, *, prompt):
        found.append(self.num_on_device)
        return original(self, layer, work, prompt=prompt)

    monkeypatch.setattr(RankExperts, "outputs", outputs)
    return found


@pytest.mark.parametrize(
    ("dp", "tp", "deaths"), [(2, 1, {}), (1, 2, {}), (2, 2, {}), (2, 1, {1: 40}), (3, 1, {2: 30})]
)
@pytest.mark.parametrize("share", [None, 3])
def test_a_device_changes_no_bit(dp, tp, deaths, share, model, computed, monkeypatch):
    """All or a third of a rank's experts on the simulated device; also after a rank was lost."""
    path, expected = model
    memory_bytes = None
    if share is not None:
        memory_bytes = path.stat().st_size // share // (dp * tp)
    config = on_device(config_of(dp, tp, 64, timeout_s=1.0), "simulated", memory_bytes)
    world = ThreadWorld(5.0, deaths)
    with followed(world, path, config, monkeypatch) as mine:
        assert asyncio.run(answers(path, mine)) == expected
    assert world.dead == set(deaths)
    assert min(computed) > 0, "a rank had no expert on its device"


def test_the_gpus_code_on_ranks(model, computed, monkeypatch):
    """On torch's CPU device answers agree but for its own arithmetic, which the first tokens' probabilities show."""
    path, expected = model
    config = on_device(config_of(2, 1, 64), "torch-cpu")
    with followed(ThreadWorld(30.0), path, config, monkeypatch) as mine:
        found = asyncio.run(answers(path, mine))
    assert len(found) == len(COUNTS)
    first = np.array([[answer[0][1] for answer in each] for each in (found, expected)])
    assert_within(*first, "non-expert/whole models")
    assert min(computed) > 0


@pytest.mark.parametrize(
    ("more", "share"),
    [
        ({"cpu_moe": True}, 0.0),
        ({"expert_cache": "off"}, 0.0),
        ({"n_cpu_moe": TOY.layers - 1}, 1 / TOY.layers),
        ({"expert_budget_bytes": 1 << 30}, 1.0),
    ],
)
def test_flags_of_one_process_mean_the_same(more, share, model, computed, monkeypatch):
    """Some layers, or all, stay on the CPU."""
    path, expected = model
    config = on_device(config_of(2, 1, 64), "simulated", **more)
    with followed(ThreadWorld(5.0), path, config, monkeypatch) as mine:
        assert asyncio.run(answers(path, mine)) == expected
    assert set(computed) == {int(share * TOY.layers * TOY.experts) // 2}


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (PlacementConfig(trunk_device="torch-cpu"), "leave out --trunk-device"),
        (PlacementConfig(gpu_layers=3), "--gpu-layers"),
        (PlacementConfig(hot=("1:2",)), "leave out --hot"),
        (
            PlacementConfig(hot_device="torch-cpu", device_memory_bytes=10),
            "--device-memory",
        ),
    ],
)
def test_refusals(placement, message, model, monkeypatch):
    """Attention on a device, and a device without room for one expert."""
    path, _ = model
    config = replace(config_of(2, 1), placement=placement)

    async def open_it() -> None:
        async with Engine.open(path, replace(config, parallel=replace(config.parallel, rank=0))):
            raise AssertionError("it was opened")

    here = ThreadWorld(1.0)
    monkeypatch.setattr("thermocline.engine.mesh_builder.open_store", lambda _: here.store(0))
    with pytest.raises((ConfigError, DeviceMemoryError), match=message):
        asyncio.run(open_it())
