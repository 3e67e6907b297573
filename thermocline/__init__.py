"""thermocline: run mixture-of-experts GGUF models bigger than the GPU or the RAM at hand.

Public names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "Engine": "thermocline.engine",
    "EngineConfig": "thermocline.config",
    "MemoryConfig": "thermocline.config",
    "PlacementConfig": "thermocline.config",
    "PrefetchConfig": "thermocline.config",
    "RemoteConfig": "thermocline.config",
    "SchedulerConfig": "thermocline.config",
    "TraceConfig": "thermocline.config",
    "SamplingParams": "thermocline.sampling.params",
    "TokenEvent": "thermocline.messages",
    "ThermoclineError": "thermocline.errors",
}

__all__ = [
    "Engine",
    "EngineConfig",
    "MemoryConfig",
    "PlacementConfig",
    "PrefetchConfig",
    "RemoteConfig",
    "SamplingParams",
    "SchedulerConfig",
    "ThermoclineError",
    "TokenEvent",
    "TraceConfig",
    "__version__",
]

if TYPE_CHECKING:
    from thermocline.config import (
        EngineConfig,
        MemoryConfig,
        PlacementConfig,
        PrefetchConfig,
        RemoteConfig,
        SchedulerConfig,
        TraceConfig,
    )
    from thermocline.engine import Engine
    from thermocline.errors import ThermoclineError
    from thermocline.messages import TokenEvent
    from thermocline.sampling.params import SamplingParams


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'thermocline' has no attribute {name!r}")
    return getattr(import_module(home), name)
