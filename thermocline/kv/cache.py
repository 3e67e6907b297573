"""The records of one engine's cache: its size, and its pools of keys, values and recurrent states. Owns neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.kernels.cache_format import CacheType
    from thermocline.kv.pool import KVPool
    from thermocline.kv.recurrent import StatePool


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The size of a cache.

    num_blocks: of each layer that keeps all tokens; min_blocks: to how few that may shrink where memory is short.
    window_blocks: of each layer with a sliding window; 0 without such layers. num_states: slots of recurrent state, of
    which the last `num_snapshots` are for snapshots. num_draft_states: slots behind these, for steps with drafted rows.
    """

    type: CacheType
    block_tokens: int
    num_blocks: int
    min_blocks: int
    window_blocks: int
    num_states: int
    num_snapshots: int = 0
    num_draft_states: int = 0

    @property
    def num_live_states(self) -> int:
        """Slots for sequences."""
        return self.num_states - self.num_snapshots

    @property
    def num_state_slots(self) -> int:
        """All slots of recurrent state."""
        return self.num_states + self.num_draft_states


@dataclass(frozen=True, slots=True)
class SequenceCache:
    """The pools of one engine. states: None where no layer is recurrent."""

    kv: KVPool
    states: StatePool | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that can be given to requests."""
        return self.kv.num_blocks
