"""What reads from disk cost where memory does not hold the whole file, eviction included. Pure.

Knows sizes and the disk's speeds, not what is computed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thermocline.costmodel.machine_speeds import DiskSpeeds
    from thermocline.experts.placement.planner import Plan
    from thermocline.models.sizes import ModelSizes


# Upper bound of the steps whose experts memory keeps; bisection finds the number to a millionth.
_MOST_STEPS: Final = 1e9
_HALVINGS: Final = 60
# Bytes that a step reads per missing byte: predicted experts of the next layer included. Measured: 1.01 to 1.28 with
# three models.
_READ_AHEAD: Final = 1.15


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of the file that memory can hold, and that it holds when the phase begins."""

    room_bytes: int
    resident_bytes: int


class DiskCosts:
    """Seconds to read what memory lacks. Non-expert weights are evicted last."""

    def __init__(
        self,
        sizes: ModelSizes,
        speeds: DiskSpeeds | None,
        plan: Plan | None,
        memory: HostMemory | None,
    ) -> None:
        total = sizes.total if plan is None else plan.host_bytes - plan.host_kv_bytes
        self._experts = sizes.routed - (0 if plan is None else plan.hot_expert_bytes)
        self._non_expert = total - self._experts
        self._speeds = speeds
        first = again = 0
        if memory is not None:
            first, again = (
                max(0, total - held) for held in (memory.resident_bytes, memory.room_bytes)
            )
            if max(first, again) and speeds is None:
                raise ConfigError("the disk's speed is not known: measure again with this file")
        self._missing_first, self._missing_again = first, again
        self._room = 0 if memory is None else max(0, memory.room_bytes - self._non_expert)
        self._free = 0.0 if memory is None else memory.room_bytes - memory.resident_bytes

    def first_use_s(self, nbytes: float) -> float:
        """Return the seconds to read so many bytes of non-expert weights, ahead of their first use."""
        missing = max(0, self._missing_first - self._experts)
        if self._speeds is None or not nbytes or not missing:
            return 0.0
        nbytes *= missing / self._non_expert
        self._free -= nbytes
        return nbytes / self._speeds.sequential_bytes_per_s

    def stream_s(
        self, chosen_bytes: float, all_bytes: float, ahead_s: float, chunk_index: int
    ) -> tuple[float, float]:
        """Return the seconds to read a layer's experts ahead for a prompt's chunk, and the CPU seconds of it.

        ahead_s: of computing, before it is known which are chosen: any of them are read so long. What has to go goes
        beside what is read.
        """
        missing = self._missing_again if chunk_index else self._missing_first
        if self._speeds is None or not all_bytes or not missing:
            return 0.0, 0.0
        missing_share = min(1.0, missing / self._experts)
        ahead_bytes = min(ahead_s * self._speeds.sequential_bytes_per_s, all_bytes * missing_share)
        in_vain = ahead_bytes * (1 - chosen_bytes / all_bytes)
        nbytes = chosen_bytes * missing_share + in_vain
        gone = min(nbytes, max(0.0, nbytes - self._free))
        self._free = max(0.0, self._free - nbytes)
        return _moved(self._speeds, nbytes, self._speeds.sequential_bytes_per_s, gone)

    def ahead_share(self, nbytes: float) -> float:
        """Return the share of a layer's experts that can be read while the layer before is computed."""
        return min(1.0, max(0.0, self._room / nbytes - 1)) if nbytes else 1.0

    def absent_shares(
        self,
        chosen: Sequence[Sequence[float]],
        expert_bytes: Sequence[int],
        steps_since_prompt: int | None,
        again: Sequence[float],
    ) -> tuple[float, ...]:
        """Return for each layer the share of a step's chosen bytes that memory lacks: see `absent_shares`."""
        if not self._missing_again:
            return (0.0,) * len(chosen)
        return absent_shares(chosen, expert_bytes, self._room, steps_since_prompt, again)

    def selected_s(self, nbytes: float) -> tuple[float, float]:
        """Return the seconds to read so many bytes of chosen experts that memory lacks, and the CPU seconds of it."""
        if self._speeds is None or not nbytes:
            return 0.0, 0.0
        nbytes *= _READ_AHEAD
        return _moved(self._speeds, nbytes, self._speeds.expert_bytes_per_s, nbytes)


def _moved(
    speeds: DiskSpeeds, nbytes: float, bytes_per_s: float, gone: float
) -> tuple[float, float]:
    """Return the seconds, and the CPU's, to read so many bytes while as many as `gone` are released."""
    cpu_s = nbytes * speeds.cpu_s_per_byte + gone * speeds.release_cpu_s_per_byte
    return max(nbytes / bytes_per_s, gone / speeds.release_bytes_per_s), cpu_s


def absent_shares(
    chosen: Sequence[Sequence[float]],
    expert_bytes: Sequence[int],
    room_bytes: float,
    steps_since_prompt: int | None = None,
    again: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Return for each layer the share of a step's chosen bytes that a least-recently-used memory lacks.

    chosen: for each layer, the probability that a step chooses each expert that is read from the file. An expert is
    in memory if one of the last n steps chose it, with the largest n that memory allows (Che, Tung and Wang,
    "Hierarchical Web Caching Systems", 2002). Each layer is computed once per step, so half of the oldest step's
    experts are gone. A prompt uses all experts: those that later steps have not replaced are any of them.
    again: for each layer, how often a step does with an expert what the step before did, and does not choose anew; None
    is never.
    """
    chances = [np.clip(layer, 0.0, 1.0 - 1e-12) for layer in map(np.asarray, chosen)]
    same = (0.0,) * len(chances) if again is None else again
    first = [np.log1p(-each) for each in chances]
    later = [np.log1p(-each * (1 - share)) for each, share in zip(chances, same, strict=True)]

    def not_chosen(layer: int, num_steps: float) -> NDArray[np.float64]:
        """Return the probability that none of so many steps chooses each expert, as a logarithm."""
        steps = np.array((min(num_steps, 1.0), max(num_steps - 1.0, 0.0)))
        found: NDArray[np.float64] = steps @ (first[layer], later[layer])
        return found

    def kept_bytes(num_steps: float) -> float:
        return sum(
            nbytes * float(-np.expm1(not_chosen(layer, num_steps)).sum())
            for layer, nbytes in enumerate(expert_bytes)
        )

    low, high = 0.0, _MOST_STEPS
    for _ in range(_HALVINGS):
        # By factors once there is one: the number may be a fraction of a step or millions.
        middle = (low * high) ** 0.5 if low else high / 1e6
        low, high = (middle, high) if kept_bytes(middle) <= room_bytes else (low, middle)
    num_steps, left_share = max(0.0, low - 0.5), 0.0
    if steps_since_prompt is not None and steps_since_prompt < num_steps:
        num_steps = steps_since_prompt
        kept = kept_bytes(num_steps)
        others = sum(n * len(layer) for n, layer in zip(expert_bytes, chosen, strict=True)) - kept
        left_share = min(1.0, (room_bytes - kept) / others) if others > 0 else 1.0
    found = []
    for layer, (each, share) in enumerate(zip(chosen, same, strict=True)):
        total = sum(each)
        anew = float((np.asarray(each) * np.exp(not_chosen(layer, num_steps))).sum())
        missed = (1 - share) * anew + share * max(0.0, 1.0 - num_steps) * total
        found.append(missed * (1 - left_share) / total if total else 0.0)
    return tuple(found)
