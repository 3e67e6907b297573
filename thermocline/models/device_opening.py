"""Opens a model's trunk on a device, where one is asked for and there. Loads torch only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.gpu.memory import device_memory
from thermocline.kernels.gpu.requirements import require_packages

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

    What must be closed is given to `owned`. Raises DeviceMissingError where there is no such device, or
    not what drives it, DeviceMemoryError where it is too small.
    """
    if kind == "cpu" or (kind == "auto" and device_memory() is None):
        return None
    require_packages()
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.models.device_trunk import DeviceTrunk, has_room

    streams = owned.enter_context(DeviceStreams.open("cuda" if kind == "auto" else kind))
    if kind == "auto" and not has_room(model, streams.free_bytes(), wish):
        return None
    return DeviceTrunk(model, kernels, streams, wish)
