"""What layers remember of earlier tokens: keys and values, or recurrent state. Owns neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.kv.pool import KVPool
    from thermocline.kv.recurrent import StatePool


@dataclass(frozen=True, slots=True)
class SequenceCache:
    """The pools of one engine. states: None where no layer is recurrent."""

    kv: KVPool
    states: StatePool | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that can be given to requests."""
        return self.kv.num_blocks
