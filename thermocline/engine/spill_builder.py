"""Opens the second tier of the prompt cache, where the config asks for one. A part of the assembly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.errors import ConfigError
from thermocline.kv.spill_index import PartKind, SpillIndex
from thermocline.kv.spill_store import PartBytes, SpillStore
from thermocline.pipeline.scheduling.request_spill import RequestSpill
from thermocline.pipeline.scheduling.spill_costs import SpillCosts
from thermocline.pipeline.spilling import Spilling
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from thermocline.engine.build_context import BuildContext
    from thermocline.kv.cache import SequenceCache
    from thermocline.pipeline.scheduling.scheduler import Scheduler

_DISK_BYTES: Final = 16 << 30
_CHUNKS_AHEAD: Final = 4
"""Prompt chunks that find nothing but copied blocks to evict: copying runs many times as fast as computing."""


@dataclass(frozen=True, slots=True)
class SpillTier:
    """The tier before a scheduler has it. decides: what it holds; store: its bytes."""

    decides: RequestSpill
    store: SpillStore
    levels: tuple[str, ...]


def open_spill(context: BuildContext, cache: SequenceCache) -> SpillTier | None:
    """Return the second tier of a cache, None without one.

    Raises ConfigError where there can be none, or for a folder that takes no file.
    """
    config, memory = context.config, context.config.memory
    if not memory.spills:
        return None
    if not config.scheduler.prefix_cache:
        raise ConfigError(
            "--cache-spill keeps prompts that the prefix cache has no room for: leave out --no-prefix-cache"
        )
    if config.parallel.rank is not None:
        raise ConfigError("--cache-spill is of one process: leave it out under torchrun")
    if context.devices.device_layers:
        raise ConfigError(
            "the prompt cache is on the GPU, from where it is not spilt: start with --trunk-device cpu, or leave out "
            "--cache-spill and --cache-spill-dir"
        )
    spec, sizes = context.model.spec, context.devices.cache
    windows = spec.window_layers if spec.window is not None and sizes.window_blocks else ()
    parts = PartBytes(cache, frozenset(windows))
    levels = {"memory": memory.spill_bytes} if memory.spill_bytes else {}
    if memory.spill_dir is not None:
        levels["disk"] = memory.spill_disk_bytes or _DISK_BYTES
    part_bytes = {kind: parts.num_bytes(kind) for kind in PartKind}
    chunk_blocks = ceil_div(_CHUNKS_AHEAD * context.limits.chunk_tokens, sizes.block_tokens)
    ahead = {
        PartKind.BLOCK: min(chunk_blocks, sizes.num_blocks // 2),
        PartKind.WINDOW: min(chunk_blocks, sizes.window_blocks // 2),
        PartKind.STATE: ceil_div(sizes.num_snapshots, 2),
    }
    index = SpillIndex(tuple(levels.values()))
    decides = RequestSpill(index, SpillCosts(len(levels)), part_bytes, ahead)
    store = context.owned.enter_context(
        SpillStore(parts, memory.spill_bytes or 0, memory.spill_dir)
    )
    return SpillTier(decides, store, tuple(levels))


def start_spilling(context: BuildContext, tier: SpillTier, scheduler: Scheduler) -> Spilling:
    """Return what copies, for a scheduler that was made with the tier."""
    spilling = Spilling(tier.decides, scheduler, tier.store, context.recorder, tier.levels)
    return context.owned.enter_context(spilling)
