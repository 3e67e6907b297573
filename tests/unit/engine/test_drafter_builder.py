"""Where nothing is drafted, an engine says why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from thermocline.config import EngineConfig, SpeculationConfig
from thermocline.engine.drafter_builder import build_speculator, why_undraftable
from thermocline.messages import RequestId


@pytest.mark.parametrize("names", ["auto", "lookup", "off"])
def test_nothing_is_drafted_for_a_device_s_steps(names):
    """Non-expert weights on a device: no drafters, a reason for each request, and no error for a drafter that is named."""
    config = EngineConfig(speculation=SpeculationConfig(drafters=names))
    devices = SimpleNamespace(non_expert=object())
    context = SimpleNamespace(config=config, devices=devices, recorder=None)
    speculator = build_speculator(context)
    assert speculator.names == ()
    speculator.check(("lookup",))
    speculator.begin(RequestId(1), [1, 2, 3], None)
    why = speculator.why_off(RequestId(1))
    assert why is not None
    assert ("turned off" in why) if names == "off" else ("a device has" in why)
    assert why_undraftable(SimpleNamespace(non_expert=None)) is None
