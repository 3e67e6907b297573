"""A drafter that can not get what it reads is left out, and an engine says why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from thermocline.config import EngineConfig, SpeculationConfig
from thermocline.engine import drafter_builder
from thermocline.engine.drafter_builder import build_speculator, why_unreadable
from thermocline.messages import LayerIndex, RequestId
from thermocline.speculation.contract import DrafterFacts
from thermocline.speculation.lookup import LookupDrafter

READER = SimpleNamespace(
    facts=DrafterFacts("dflash", computes=True, reads_hidden=True, reads_layers=(LayerIndex(1),)),
    begin=lambda request, prompt: None,
)


def speculator_of(monkeypatch, names, non_expert):
    monkeypatch.setattr(drafter_builder, "open_drafters", lambda _: [LookupDrafter(), READER])
    config = EngineConfig(speculation=SpeculationConfig(drafters=names))
    devices = SimpleNamespace(non_expert=non_expert)
    return build_speculator(SimpleNamespace(config=config, devices=devices, recorder=None))


@pytest.mark.parametrize("names", ["auto", "dflash", "dflash,lookup", "off"])
def test_layers_on_a_device_are_read_by_nobody(monkeypatch, names):
    """Who needs their inputs is off with a reason, whoever names it; others draft."""
    speculator = speculator_of(monkeypatch, names, object())
    left = {"auto": ("lookup",), "dflash": (), "dflash,lookup": ("lookup",), "off": ()}[names]
    assert {each.facts.name for each in speculator.drafters} == {"lookup"}
    speculator.check(("dflash",))
    speculator.begin(RequestId(1), [1, 2, 3], None)
    speculator.begin(RequestId(2), [1, 2, 3], ("dflash",))
    why = speculator.why_off(RequestId(1))
    if left:
        assert why is None
    else:
        assert why is not None
        assert ("turned off" in why) if names == "off" else ("single layers" in why)
    assert "single layers" in (speculator.why_off(RequestId(2)) or "")
    assert (speculator.why_none is None) == (names != "dflash")


def test_layers_on_the_cpu_are_read(monkeypatch):
    """Nobody is left out there."""
    speculator = speculator_of(monkeypatch, "auto", None)
    assert {each.facts.name for each in speculator.drafters} == {"lookup", "dflash"}
    assert why_unreadable(SimpleNamespace(non_expert=None)) is None
