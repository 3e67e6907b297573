"""thermocline: run mixture-of-experts GGUF models bigger than the GPU or the RAM at hand.

`LLM` is for scripts and notebooks, `Engine` for asyncio. Public names are loaded when first used, so that importing the
package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "Answer": "thermocline.engine.llm",
    "BusyError": "thermocline.errors",
    "ChatTemplateError": "thermocline.errors",
    "ConfigError": "thermocline.errors",
    "Constraint": "thermocline.sampling.constraint",
    "ConstraintKind": "thermocline.sampling.constraint",
    "CpuConfig": "thermocline.config",
    "DeviceMissingError": "thermocline.errors",
    "Embeddings": "thermocline.engine.embedding",
    "Engine": "thermocline.engine",
    "EngineClosedError": "thermocline.errors",
    "EngineConfig": "thermocline.config",
    "EngineError": "thermocline.errors",
    "FinishReason": "thermocline.messages",
    "HeatConfig": "thermocline.config",
    "LLM": "thermocline.engine.llm",
    "MemoryConfig": "thermocline.config",
    "ModelChangedError": "thermocline.errors",
    "ModelError": "thermocline.errors",
    "NativeModuleError": "thermocline.errors",
    "PlacementConfig": "thermocline.config",
    "PrefetchConfig": "thermocline.config",
    "PromptTooLongError": "thermocline.errors",
    "RemoteConfig": "thermocline.config",
    "RequestError": "thermocline.errors",
    "SamplingParams": "thermocline.sampling.params",
    "SchedulerConfig": "thermocline.config",
    "SpeculationConfig": "thermocline.config",
    "ThermoclineError": "thermocline.errors",
    "Timings": "thermocline.messages",
    "TokenEvent": "thermocline.messages",
    "TokenLogprob": "thermocline.messages",
    "TraceConfig": "thermocline.config",
}

__all__ = [
    "LLM",
    "Answer",
    "BusyError",
    "ChatTemplateError",
    "ConfigError",
    "Constraint",
    "ConstraintKind",
    "CpuConfig",
    "DeviceMissingError",
    "Embeddings",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "FinishReason",
    "HeatConfig",
    "MemoryConfig",
    "ModelChangedError",
    "ModelError",
    "NativeModuleError",
    "PlacementConfig",
    "PrefetchConfig",
    "PromptTooLongError",
    "RemoteConfig",
    "RequestError",
    "SamplingParams",
    "SchedulerConfig",
    "SpeculationConfig",
    "ThermoclineError",
    "Timings",
    "TokenEvent",
    "TokenLogprob",
    "TraceConfig",
    "__version__",
]

if TYPE_CHECKING:
    from thermocline.config import (
        CpuConfig,
        EngineConfig,
        HeatConfig,
        MemoryConfig,
        PlacementConfig,
        PrefetchConfig,
        RemoteConfig,
        SchedulerConfig,
        SpeculationConfig,
        TraceConfig,
    )
    from thermocline.engine import Engine
    from thermocline.engine.embedding import Embeddings
    from thermocline.engine.llm import LLM, Answer
    from thermocline.errors import (
        BusyError,
        ChatTemplateError,
        ConfigError,
        DeviceMissingError,
        EngineClosedError,
        EngineError,
        ModelChangedError,
        ModelError,
        NativeModuleError,
        PromptTooLongError,
        RequestError,
        ThermoclineError,
    )
    from thermocline.messages import FinishReason, Timings, TokenEvent, TokenLogprob
    from thermocline.sampling.constraint import Constraint, ConstraintKind
    from thermocline.sampling.params import SamplingParams


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'thermocline' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
