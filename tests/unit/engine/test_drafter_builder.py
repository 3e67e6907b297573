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

READERS = {
    facts.name: SimpleNamespace(facts=facts, begin=lambda request, prompt: None)
    for facts in (
        DrafterFacts("dflash", computes=True, reads_hidden=True, reads_layers=(LayerIndex(1),)),
        DrafterFacts("eagle3", computes=True, reads_hidden=True, reads_layers=(LayerIndex(1),)),
        DrafterFacts("assistant", computes=True, reads_hidden=True, reads_cache=True),
    )
}


def speculator_of(monkeypatch, names, non_expert, reader="dflash"):
    monkeypatch.setattr(
        drafter_builder, "open_drafters", lambda _: [LookupDrafter(), READERS[reader]]
    )
    config = EngineConfig(speculation=SpeculationConfig(drafters=names))
    devices = SimpleNamespace(non_expert=non_expert)
    return build_speculator(SimpleNamespace(config=config, devices=devices, recorder=None))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("names", ["auto", "READER", "READER,lookup", "off"])
def test_layers_on_a_device_are_read_by_nobody(monkeypatch, names, reader):
    """Who needs their inputs, or their keys and values, is off with a reason, whoever names it; others draft."""
    left = {"auto": ("lookup",), "READER": (), "READER,lookup": ("lookup",), "off": ()}[names]
    names = names.replace("READER", reader)
    speculator = speculator_of(monkeypatch, names, object(), reader)
    assert {each.facts.name for each in speculator.drafters} == {"lookup"}
    speculator.check((reader,))
    speculator.begin(RequestId(1), [1, 2, 3], None)
    speculator.begin(RequestId(2), [1, 2, 3], (reader,))
    why = speculator.why_off(RequestId(1))
    if left:
        assert why is None
    else:
        assert why is not None
        assert ("turned off" in why) if names == "off" else ("single layers" in why)
    assert "single layers" in (speculator.why_off(RequestId(2)) or "")
    assert (speculator.why_none is None) == (names != reader)


@pytest.mark.parametrize("reader", READERS)
def test_layers_on_the_cpu_are_read(monkeypatch, reader):
    """Nobody is left out there."""
    speculator = speculator_of(monkeypatch, "auto", None, reader)
    assert {each.facts.name for each in speculator.drafters} == {"lookup", reader}
    assert why_unreadable(SimpleNamespace(non_expert=None)) is None
