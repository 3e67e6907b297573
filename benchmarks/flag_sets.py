"""The sets of flags that somebody would try by hand, 20 for each setting, and the settings. Runs nothing.

Each set of a setting is parsed as the command line parses it. Flags that change answers are left out.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import click

from thermocline.cli.options import PLACE_FLAGS, engine_options
from thermocline.config import EngineConfig, HeatConfig
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_SETS: Final = 20
NO_FLAGS: Final = "no flags"

_FLAGS: Final = (
    *("--ctx", "--kv-type", "--prefill-chunk", "--prompt-chunks", "--decode-slowdown"),
    *("--overlap/--no-overlap", *PLACE_FLAGS),
)
_ON_CPU: Final = (
    "--prefetch off",
    "--prefetch on",
    "--prefill-chunk 64",
    "--prefill-chunk 128",
    "--prefill-chunk 512",
    "--prefill-chunk 1024",
    "--prefill-chunk 2048",
    "--prompt-chunks 2",
    "--prompt-chunks 4",
    "--no-overlap",
    "--pin-threads",
    "--pin-threads --prefetch off",
    "--prefill-chunk 1024 --prefetch off",
    "--prefill-chunk 2048 --prompt-chunks 1",
    "--decode-slowdown 4",
    "--hot-device cpu --hot-fraction 0.5",
)
_ON_DEVICE: Final = (
    "--hot-device none",
    "--expert-cache off",
    "--expert-cache static --hot-fraction 0.125",
    "--expert-cache static --hot-fraction 0.25",
    "--expert-cache static --hot-fraction 0.5",
    "--expert-cache static --hot-fraction 1",
    "--expert-cache static --hot-fraction 0.5 --prefetch off",
    "--expert-cache static --hot-fraction 0.5 --no-overlap",
    "--expert-budget 0B",
    "--prefetch off",
    "--prefill-chunk 128",
    "--prefill-chunk 1024",
    "--prefill-chunk 2048",
    "--prompt-chunks 1",
    "--no-overlap",
    "--pin-threads",
    "--hot-device cpu --hot-fraction 0.5",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a machine has: a device with so much memory behind such a link, or none; memory for the process, None for all.

    device_bytes, link_bytes_per_s: of a simulated device; 0 for none.
    """

    device_bytes: int = 0
    link_bytes_per_s: float = 0.0
    limit_bytes: int | None = None

    def __str__(self) -> str:
        if self.limit_bytes is not None:
            return f"no device, {format_bytes(self.limit_bytes)} of memory"
        if not self.device_bytes:
            return "no device"
        link = f"{self.link_bytes_per_s / 1e9:g} GB/s"
        return f"simulated device of {format_bytes(self.device_bytes)} at {link}"

    def flag_sets(self, num_processors: int) -> tuple[str, ...]:
        """Return the 20 sets."""
        few = max(num_processors // 2, 1)
        threads = (f"--threads {few}", f"--threads {num_processors}")
        if self.device_bytes:
            fixed = f"--threads {few} --expert-cache static --hot-fraction 0.5"
            found: tuple[str, ...] = (*threads, fixed, *_ON_DEVICE)
        else:
            more = (f"--threads {num_processors + 1}", f"--threads {2 * num_processors}")
            found = (*threads, *more, *_ON_CPU)
        assert len(found) == NUM_SETS, len(found)
        return found

    def config(self, flags: str) -> EngineConfig:
        """Return what the command line makes of the flags on such a machine; NO_FLAGS is none.

        A prompt that comes again is computed again, and no use of experts is remembered.
        """
        given = parse_flags(shlex.split("" if flags == NO_FLAGS else flags))
        placement = given.placement
        if self.device_bytes and placement.hot_device == "auto":
            placement = replace(placement, hot_device="simulated")
        if self.device_bytes:
            placement = replace(
                placement,
                simulated_memory_bytes=self.device_bytes,
                simulated_copy_bytes_per_s=self.link_bytes_per_s,
            )
        scheduler = replace(given.scheduler, prefix_cache=False)
        heat = HeatConfig(enabled=False)
        return replace(given, placement=placement, scheduler=scheduler, heat=heat)


def settings_for(experts_bytes: int, total_bytes: int) -> dict[str, Setting]:
    """Return the settings of a model by short name: sizes in parts of its experts, and of its file."""
    devices = {
        f"device-{name}-{link_name}": Setting(int(share * experts_bytes), link)
        for name, share in (("small", 0.25), ("large", 0.75))
        for link_name, link in (("slow", 2e9), ("fast", 2e10))
    }
    return {"cpu": Setting(), **devices, "memory": Setting(limit_bytes=total_bytes * 6 // 10)}


def parse_flags(arguments: Sequence[str]) -> EngineConfig:
    """Return the config of some flags of `run`."""
    found: list[EngineConfig] = []

    @click.command()
    @engine_options(*_FLAGS)
    def take(config: EngineConfig) -> None:
        found.append(config)

    take.main(list(arguments), standalone_mode=False)
    return found[0]
