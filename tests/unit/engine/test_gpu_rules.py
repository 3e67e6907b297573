"""What decides whether a GPU is trusted, and whether experts come to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from thermocline.costmodel.expert_costs import ExpertCosts
from thermocline.engine import devices
from thermocline.experts.backends import hot_device
from thermocline.models.device import check as device_check
from thermocline.models.device import non_expert as device_non_expert


@pytest.mark.parametrize(
    ("kind", "is_asked", "is_checked"),
    [("cuda", True, True), ("cuda", False, True), ("cpu", True, False), ("cpu", False, True)],
)
def test_a_gpu_is_checked_whoever_asked_for_it(monkeypatch, kind, is_asked, is_checked):
    """One that computes something else answers with nonsense; a stand-in that was asked for is no GPU."""
    checked = []
    monkeypatch.setattr(device_non_expert, "DeviceNonExpert", lambda *_, **__: "there")
    monkeypatch.setattr(device_check, "check_non_expert", lambda *given: checked.append(given))
    streams = SimpleNamespace(device=torch.device(kind))
    allocation = SimpleNamespace(cache=None, part=None)
    found = devices._open_non_expert(None, None, streams, allocation, None, is_asked=is_asked)
    assert found == "there"
    assert checked == [("there", None)] * is_checked


@pytest.mark.parametrize("records_steps", [False, True])
def test_experts_come_to_a_gpu_that_records_its_steps(records_steps):
    """A launch by the host takes longer than the CPU's layer, and a recorded step has none."""
    costs = ExpertCosts(
        *(100, "q4", (1, 16), (1.0, 4.0), (0.1, 0.4)),
        copy_s=2.0,
        launch_overhead_s=3.0,
        recorded=(0.05, 0.01),
    )
    empty = hot_device._EmptyDevice(
        *(None, (0,), 800, 0, None, None, ()), records_steps=records_steps
    )
    catalog = SimpleNamespace(num_experts=8)
    experts = SimpleNamespace(catalog=catalog, num_used=3, warmth=None, kept_away=None)
    policy = hot_device._cache_policy(empty, experts, [costs, None])
    assert policy.reason.startswith("nothing is copied") != records_steps
