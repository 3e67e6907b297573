"""Opens a model's trunk on a device, where one is asked for and there. Loads torch only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.errors import ConfigError
from thermocline.kernels.gpu.memory import device_memory

if TYPE_CHECKING:
    from contextlib import ExitStack

    from thermocline.config import TrunkDevice
    from thermocline.kernels.contract import Kernels
    from thermocline.kv.cache import CacheWish
    from thermocline.models.contract import Model
    from thermocline.models.device_trunk import DeviceTrunk


def open_device_trunk(
    kind: TrunkDevice, wish: CacheWish, model: Model, kernels: Kernels, owned: ExitStack
) -> DeviceTrunk | None:
    """Return the trunk on its device with its cache; None where the CPU's kernels compute it.

    What must be closed is given to `owned`. Raises ConfigError where there is no such device,
    DeviceMemoryError where it is too small.
    """
    if kind == "cpu" or (kind == "auto" and device_memory() is None):
        return None
    try:
        from thermocline.kernels.gpu.streams import DeviceStreams
        from thermocline.models.device_trunk import DeviceTrunk, has_room
    except ImportError as error:
        raise ConfigError(
            f"--trunk-device {kind} needs torch and Triton ({error}): install them (pip install thermocline[gpu]), "
            "or choose --trunk-device cpu"
        ) from error
    streams = owned.enter_context(DeviceStreams.open("cuda" if kind == "auto" else kind))
    if kind == "auto" and not has_room(model, streams.free_bytes(), wish):
        return None
    return DeviceTrunk(model, kernels, streams, wish)
