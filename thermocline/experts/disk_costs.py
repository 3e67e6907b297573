"""What it costs that memory does not hold the whole file: waits for reads, and room that is made for them. Pure.

Knows the sizes and the disk's speeds, not what is computed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from thermocline.experts.machine_speeds import DiskSpeeds
    from thermocline.experts.planner import Plan
    from thermocline.models.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of the file that memory can hold, and that it holds when the phase begins."""

    room_bytes: int
    resident_bytes: int


class DiskCosts:
    """Seconds to read what memory lacks; what every token needs is the last that it lacks."""

    def __init__(
        self,
        sizes: ModelSizes,
        speeds: DiskSpeeds | None,
        plan: Plan | None,
        memory: HostMemory | None,
    ) -> None:
        total = sizes.total if plan is None else plan.host_bytes - plan.host_kv_bytes
        self._experts = sizes.routed - (0 if plan is None else plan.hot_expert_bytes)
        self._trunk = total - self._experts
        self._speeds = speeds
        first = again = 0
        if memory is not None:
            first, again = (
                max(0, total - held) for held in (memory.resident_bytes, memory.room_bytes)
            )
            if max(first, again) and speeds is None:
                raise ConfigError("the disk's speed is not known: measure again with this file")
        self._missing_first, self._missing_again = first, again
        self._room = 0 if memory is None else max(0, memory.room_bytes - self._trunk)
        self._free = 0.0 if memory is None else memory.room_bytes - memory.resident_bytes

    def first_trunk_s(self, nbytes: float) -> float:
        """Return how long the first use of so many bytes of the trunk waits for them."""
        missing = max(0, self._missing_first - self._experts)
        if self._speeds is None or not nbytes or not missing:
            return 0.0
        nbytes *= missing / self._trunk
        self._free -= nbytes
        return nbytes / self._speeds.fault_bytes_per_s

    def stream_s(self, nbytes: float, chunk_index: int) -> tuple[float, float]:
        """Return how long so many bytes of all experts take, read ahead for a prompt's chunk.

        The second number is the processor's time of it, all threads together.
        """
        missing = self._missing_again if chunk_index else self._missing_first
        if self._speeds is None or not nbytes or not missing:
            return 0.0, 0.0
        nbytes *= min(1.0, missing / self._experts)
        gone = min(nbytes, max(0.0, nbytes - self._free))
        self._free = max(0.0, self._free - nbytes)
        speeds = self._speeds
        cpu_s = nbytes * speeds.cpu_s_per_byte + gone * speeds.release_cpu_s_per_byte
        return nbytes / speeds.sequential_bytes_per_s + gone / speeds.release_bytes_per_s, cpu_s

    def ahead_share(self, nbytes: float) -> float:
        """Return how much of a layer's experts can be read while those of the one before are computed."""
        return min(1.0, max(0.0, self._room / nbytes - 1)) if nbytes else 1.0

    def selected_s(self, nbytes: float) -> float:
        """Return how long a step waits for so many bytes of chosen experts."""
        if self._speeds is None or not nbytes or not self._missing_again:
            return 0.0
        nbytes *= min(1.0, self._missing_again / self._experts)
        return nbytes / self._speeds.expert_bytes_per_s + nbytes / self._speeds.release_bytes_per_s
