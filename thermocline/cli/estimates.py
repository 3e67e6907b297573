"""How fast a plan would go, for people and for JSON: estimates out of this machine's measured speeds.

Prints nothing, decides nothing: the cost model says what things cost, the calibration what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.cli.console import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thermocline.cli.expert_use import KnownUse
    from thermocline.costmodel.cost_model import Estimate
    from thermocline.costmodel.machine_speeds import MachineSpeeds
    from thermocline.experts.placement.planner import Plan
    from thermocline.models.sizes import ModelSizes

# Tokens that come before the one whose decoding is priced.
_CACHED_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Estimates:
    """A prompt's and an answer's speed.

    on_cpu_alone: nothing is known of the plan's device. without_disk: nothing is known of the disk, which the
    plan reads from.
    """

    prefill: Estimate
    decode: Estimate
    on_cpu_alone: bool
    without_disk: bool

    def lines(self) -> tuple[str, ...]:
        """Return a sentence for each."""
        where = " on the CPU alone, as nothing is known of the device" if self.on_cpu_alone else ""
        where += ", without reads from disk, which were not measured" if self.without_disk else ""
        return tuple(
            f"estimate{where}: {each.phase.value} {each}" for each in (self.prefill, self.decode)
        )

    def as_dict(self) -> dict[str, object]:
        """Return plain values: tokens per second, what bounds them, and seconds by resource."""
        found: dict[str, object] = {
            each.phase.value: {
                "tokens_per_s": each.tokens_per_s,
                "bound": each.bound,
                "seconds": each.seconds,
                "parts": {part.value: spent for part, spent in each.parts.items() if spent},
            }
            for each in (self.prefill, self.decode)
        }
        return found | {"on_cpu_alone": self.on_cpu_alone, "without_disk": self.without_disk}


def speeds_for(
    path: str, files: Sequence[Path], kv_type: str, *, may_measure: bool
) -> MachineSpeeds | None:
    """Return what this machine reaches with the model; None where that was not measured and may not be.

    files: all files of the model at `path`.
    """
    from thermocline.calibration.calibrate import known_speeds, machine_speeds
    from thermocline.config import CpuConfig

    known = known_speeds(files, CpuConfig(), kv_type)
    if known is not None or not may_measure:
        return known
    with Progress() as progress:
        progress.say("measuring this machine with this file, once")
        return machine_speeds(path, CpuConfig(), kv_type)


def make_estimates(
    sizes: ModelSizes,
    speeds: MachineSpeeds,
    plan: Plan,
    *,
    ram_bytes: int,
    chunk_tokens: int,
    use: KnownUse,
) -> Estimates:
    """Return the estimates of one chunk of a prompt, and of the next token behind as much context.

    Memory holds of the file what it can when they begin.
    """
    from thermocline.costmodel.cost_model import Phase, Workload, estimate
    from thermocline.costmodel.disk_costs import HostMemory
    from thermocline.prefetch.governor_builder import spare_bytes

    on_cpu_alone = plan.device_bytes > 0 and speeds.device is None
    priced = None if on_cpu_alone else plan
    fits = plan.host_bytes <= ram_bytes
    left = ram_bytes - plan.host_kv_bytes
    room = max(0, left - spare_bytes(left))
    memory = None if fits or speeds.disk is None else HostMemory(room, room)

    def of(work: Workload) -> Estimate:
        return estimate(sizes, speeds, priced, work, memory=memory, **use._asdict())

    return Estimates(
        of(Workload(Phase.PREFILL, chunk_tokens, chunk_tokens=chunk_tokens)),
        of(Workload(Phase.DECODE, 1, cached_tokens=_CACHED_TOKENS)),
        on_cpu_alone,
        without_disk=not fits and memory is None,
    )
