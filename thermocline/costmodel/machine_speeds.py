"""How fast a machine computes each part of one model: plain data, to JSON and back. Pure.

Measured, or described for a hypothetical machine. Knows neither the measurement nor its use.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

SPEEDS_VERSION: Final = 2
"""Of the JSON form: speeds of another version are measured again."""


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Seconds that a byte of weights takes, by how many rows of activations it is multiplied with.

    rows: ascending, from 1; seconds_per_byte: as many. Few rows cost what reading costs, many what
    multiplying costs.
    """

    rows: tuple[int, ...]
    seconds_per_byte: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if not self.rows or len(self.rows) != len(self.seconds_per_byte) or not ascending:
            raise ConfigError("costs by rows need ascending rows, and a cost for each of them")
        if self.rows[0] < 1 or min(self.seconds_per_byte) <= 0:
            raise ConfigError("costs by rows must be above 0, for 1 row or more")

    def seconds(self, nbytes: float, rows: float) -> float:
        """Return what `nbytes` bytes cost with `rows` rows each: linear between what was measured.

        Less than the first costs as much as it; beyond the last, rows cost alike.
        """
        if rows >= self.rows[-1]:
            return nbytes * self.seconds_per_byte[-1] * rows / self.rows[-1]
        if rows <= self.rows[0]:
            return nbytes * self.seconds_per_byte[0]
        above = bisect_left(self.rows, rows)
        low, high = self.rows[above - 1], self.rows[above]
        first, second = self.seconds_per_byte[above - 1], self.seconds_per_byte[above]
        return nbytes * (first + (second - first) * (rows - low) / (high - low))

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes per second with one row."""
        return 1 / self.seconds_per_byte[0]


@dataclass(frozen=True, slots=True)
class AttentionSpeeds:
    """Seconds of one (query, cached token) pair in one layer, all heads: of a step's token, of a prompt's."""

    decode_pair_s: float
    prompt_pair_s: float


@dataclass(frozen=True, slots=True)
class DiskSpeeds:
    """Bytes per second from the disk that holds the file.

    sequential: experts one after another, with as many reads at a time as prefetch has; experts: those of a token
    at once, and then the next ones; release: what has to go where memory is full. cpu_s_per_byte: what reading, and
    release_cpu_s_per_byte what releasing, takes of the processor, and so from the threads that compute meanwhile.
    """

    sequential_bytes_per_s: float
    expert_bytes_per_s: float
    release_bytes_per_s: float
    cpu_s_per_byte: float
    release_cpu_s_per_byte: float


@dataclass(frozen=True, slots=True)
class DeviceSpeeds:
    """A device with a memory of its own: rates per second, and seconds to start one kernel.

    pinned, pageable: copies from such host memory, or to it.
    """

    name: str
    read_bytes_per_s: float
    multiply_adds_per_s: float
    pinned_to_device_bytes_per_s: float
    pageable_to_device_bytes_per_s: float
    pinned_to_host_bytes_per_s: float
    pageable_to_host_bytes_per_s: float
    launch_s: float


@dataclass(frozen=True, slots=True)
class MachineSpeeds:
    """What one machine reaches with one model.

    read_bytes_per_s, multiply_adds_per_s: what all threads reach at most (int8 for the latter). experts: costs
    of routed experts by the layout of `LayerSizes`. trunk: costs of a layer's non-expert weights without attention's
    pairs, by `LayerSizes.non_expert_kind`. head: norm and output matrix. step_s: seconds that each chunk or
    step takes besides: planning, sampling, handing on.
    """

    threads: int
    read_bytes_per_s: float
    multiply_adds_per_s: float
    experts: Mapping[str, RowCosts]
    trunk: Mapping[str, RowCosts]
    head: RowCosts
    attention: AttentionSpeeds
    step_s: float
    disk: DiskSpeeds | None = None
    device: DeviceSpeeds | None = None

    def to_json(self) -> str:
        """Return the speeds as text that `parse_speeds` reads."""
        return json.dumps({"version": SPEEDS_VERSION, **asdict(self)}, indent=1)


def parse_speeds(text: str) -> MachineSpeeds:
    """Return the speeds that `to_json` wrote. Raises ConfigError for anything else."""
    try:
        fields = json.loads(text)
        if fields.pop("version") != SPEEDS_VERSION:
            raise ConfigError("these speeds are of another version: measure them again")
        return _speeds(fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"these are no speeds ({error!r}): measure them again") from error


def _speeds(fields: dict[str, Any]) -> MachineSpeeds:
    disk, device = fields.pop("disk"), fields.pop("device")
    return MachineSpeeds(
        experts={name: _costs(each) for name, each in fields.pop("experts").items()},
        trunk={name: _costs(each) for name, each in fields.pop("trunk").items()},
        head=_costs(fields.pop("head")),
        attention=AttentionSpeeds(**fields.pop("attention")),
        disk=None if disk is None else DiskSpeeds(**disk),
        device=None if device is None else DeviceSpeeds(**device),
        **fields,
    )


def _costs(fields: dict[str, Any]) -> RowCosts:
    return RowCosts(tuple(fields["rows"]), tuple(fields["seconds_per_byte"]))
