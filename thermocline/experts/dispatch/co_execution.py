"""Splits one layer's chosen experts between device, uploads and CPU so that the layer takes the least time. Pure.

The three work at once: the CPU computes its experts, the link uploads, and the device computes the resident experts
and then the uploaded ones as they arrive. Experts with the most rows are uploaded first. Which experts stay on the
device is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from thermocline.costmodel.expert_costs import ExpertCosts, SecondsArray
    from thermocline.messages import IntArray

BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CoExecution:
    """Who computes which of a layer's n chosen experts; each is in one of the three masks, bool [n].

    on_device: resident experts that the device computes. upload: copied to the device for this work. on_cpu: the rest,
    with resident experts that the CPU computes sooner. seconds: when the last expert is done.
    """

    on_device: BoolArray
    upload: BoolArray
    on_cpu: BoolArray
    seconds: float


def split(
    costs: ExpertCosts,
    rows: IntArray,
    resident: BoolArray,
    *,
    link_wait_s: float = 0.0,
    may_upload: bool = True,
) -> CoExecution:
    """Return the split with the least makespan; of equals the one with the fewest uploads.

    rows: int32 [n], how many tokens chose each expert; resident: bool [n], whether the device has it. link_wait_s: until
    the link has finished its present copies. Resident experts go to the CPU only where nothing is uploaded.
    """
    cpu, device = costs.cpu_seconds(rows), costs.device_seconds(rows)
    hits, misses = np.flatnonzero(resident), np.flatnonzero(~resident)
    misses = misses[np.argsort(-rows[misses], kind="stable")]
    hits = hits[np.argsort(-rows[hits], kind="stable")]
    missed, link = float(cpu[misses].sum()), _Link(costs, link_wait_s)
    # The device keeps the hits with the most rows; the CPU computes the other hits and all misses.
    kept = np.concatenate(([0.0], np.cumsum(device[hits])))
    kept[1:] += costs.launch_overhead_s
    left = np.concatenate((np.cumsum(cpu[hits][::-1])[::-1], [0.0])) + missed
    keeping = np.maximum(kept, link.stretch(left, 0.0))[::-1]
    given_away, num_uploads = int(np.argmin(keeping)), 0
    seconds = float(keeping[given_away])
    # An upload that arrives later than that is no use.
    if may_upload and link_wait_s + costs.copy_s < seconds:
        done_hits = float(device[hits].sum())
        # Most rows first; or fewest rows first, where the device would take too long for a large one.
        for order in (misses, misses[::-1]):
            uploading = _with_uploads(costs, cpu[order], device[order], done_hits, link)
            best = int(np.argmin(uploading))
            if uploading[best] < seconds:
                given_away, num_uploads, seconds, misses = 0, best, float(uploading[best]), order
        if num_uploads > 1 and rows[misses[0]] < rows[misses[num_uploads - 1]]:
            # Those with the fewest rows were chosen; they come like all others, the most rows first.
            misses = np.concatenate((misses[:num_uploads][::-1], misses[num_uploads:]))
            again = _with_uploads(costs, cpu[misses], device[misses], done_hits, link)
            seconds = float(again[num_uploads])
    on_device, upload = np.zeros_like(resident), np.zeros_like(resident)
    on_device[hits[: len(hits) - given_away]] = True
    upload[misses[:num_uploads]] = True
    return CoExecution(on_device, upload, ~(on_device | upload), seconds)


def seconds_on_device(
    costs: ExpertCosts,
    rows: IntArray,
    there: BoolArray,
    num_tokens: int,
    *,
    link_wait_s: float = 0.0,
) -> float:
    """Return when the device has computed all of a layer's chosen experts and added them up.

    there: bool [n], which experts are on the device or on their way; the others are uploaded. In place of each pair's
    output one row per token comes back; the residual stream goes there.
    """
    device = np.maximum(costs.device_seconds(rows) - costs.output_row_s * rows, 0.0)
    absent, nothing = device[~there], np.zeros(np.count_nonzero(~there))
    link = _Link(costs, link_wait_s)
    # The copies that are on their way are computed last, and nothing is left to the CPU.
    uploading = _with_uploads(costs, nothing, absent, float(device[there].sum()), link)
    return max(float(uploading[-1]), link_wait_s) + 2 * num_tokens * costs.output_row_s


@dataclass(frozen=True, slots=True)
class _Link:
    costs: ExpertCosts
    wait_s: float

    def stretch(self, cpu: SecondsArray, copying: SecondsArray | float) -> SecondsArray:
        """Return when the CPU ends `cpu` seconds of work, while copies of `copying` seconds slow it down."""
        slowdown = self.costs.copy_slowdown
        if not slowdown:
            return cpu
        slowed = cpu + slowdown * (self.wait_s + copying)
        return np.minimum(slowed, cpu / (1 - slowdown)) if slowdown < 1 else slowed


def _with_uploads(
    costs: ExpertCosts, cpu: SecondsArray, device: SecondsArray, hits: float, link: _Link
) -> SecondsArray:
    """Return the makespan with the first 0, 1, ... n of n misses uploaded, [n + 1].

    cpu, device: seconds of each miss; hits: seconds of the resident experts on the device.
    """
    numbers = np.arange(len(cpu) + 1, dtype=np.float64)
    arrivals = link.wait_s + costs.copy_s * numbers
    done_before = np.concatenate(([0.0], np.cumsum(device)))
    # The device ends when it has computed all, and it may have waited for any of the arrivals.
    first = hits + costs.launch_overhead_s
    starts = np.maximum(arrivals[1:] - done_before[:-1], first)
    device_ends = np.concatenate(
        ([first if hits else 0.0], np.maximum.accumulate(starts) + done_before[1:])
    )
    cpu_left = np.concatenate((np.cumsum(cpu[::-1])[::-1], [0.0]))
    return np.maximum(device_ends, link.stretch(cpu_left, costs.copy_s * numbers))
