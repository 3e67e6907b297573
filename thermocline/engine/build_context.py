"""What all parts of an engine are built on. A part of the assembly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import ExitStack

    from thermocline.config import EngineConfig
    from thermocline.engine.devices import Devices
    from thermocline.kernels.contract import Kernels
    from thermocline.kv.cache import SequenceCache
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.contract import Model
    from thermocline.models.prompt_limits import PromptLimits
    from thermocline.traces.recorder import Recorder


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The config, and what was opened before experts and stages are built.

    cache: keys, values and states on the host. owned: closes what is opened, the last first. kept: closed after the lanes,
    for what must see the last job.
    """

    config: EngineConfig
    devices: Devices
    file: ModelFile
    model: Model
    kernels: Kernels
    recorder: Recorder
    limits: PromptLimits
    cache: SequenceCache
    owned: ExitStack
    kept: ExitStack
