"""What a model takes of the memory, against what its engine reserves."""

from __future__ import annotations

import pytest

from tests.support.toy_archs import write_toy
from thermocline import Engine, EngineConfig, PlacementConfig
from thermocline.engine.needs import model_needs

CPU = EngineConfig(placement=PlacementConfig(hot_device="none", trunk_device="cpu"))
