"""The engine's computing threads: what was asked for, else by whether a GPU is used."""

from __future__ import annotations

import pytest

from thermocline import EngineConfig, PlacementConfig
from thermocline.config import CpuConfig
from thermocline.engine import cpu, devices
from thermocline.engine.cpu import with_threads


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU and 8 cores of two threads."""
    monkeypatch.setattr(devices, "why_no_gpu", lambda: None)
    monkeypatch.setattr(cpu, "default_threads", lambda *, beside_gpu: 7 if beside_gpu else 16)


@pytest.mark.parametrize(
    ("placement", "threads"),
    [
        ({}, 7),
        ({"cpu_moe": True}, 7),
        ({"hot_device": "cuda", "trunk_device": "cpu"}, 7),
        ({"hot_device": "none", "trunk_device": "cuda"}, 7),
        ({"hot_device": "none", "trunk_device": "cpu"}, 16),
        ({"hot_device": "none", "gpu_layers": 0}, 16),
        ({"hot_device": "none", "gpu_layers": 3}, 7),
        ({"hot_device": "torch-cpu", "trunk_device": "torch-cpu"}, 16),
    ],
    ids=str,
)
def test_a_gpu_in_use_leaves_fewer_threads(gpu, placement, threads):
    """For experts, for the rest, or for both; a stand-in is no GPU."""
    config = EngineConfig(placement=PlacementConfig(**placement))
    assert with_threads(config).cpu.threads == threads


def test_a_number_that_was_asked_for_stays(gpu):
    """Whatever is used."""
    config = EngineConfig(cpu=CpuConfig(threads=12))
    assert with_threads(config) is config


def test_without_a_gpu_all_processors_compute(gpu, monkeypatch):
    """What is missing, or reference kernels, leave everything on the CPU."""
    assert with_threads(EngineConfig(kernels="reference")).cpu.threads == 16
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "no GPU's driver is on this machine")
    assert with_threads(EngineConfig()).cpu.threads == 16


def test_a_limit_of_processor_time_is_the_reason(monkeypatch):
    """`--explain` names the group; without a limit below the machine it does not."""
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "no GPU's driver is on this machine")
    monkeypatch.setattr(cpu, "default_threads", lambda *, beside_gpu: 2)
    monkeypatch.setattr(cpu, "processor_limit", lambda: 1.5)
    assert cpu.why_threads(EngineConfig()) == "the control group allows 1.5 processors' time"
    monkeypatch.setattr(cpu, "processor_limit", lambda: None)
    assert cpu.why_threads(EngineConfig()) == "one per processor that may be used"
