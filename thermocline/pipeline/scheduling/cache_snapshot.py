"""What the cache's blocks are used for, as a record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """What the cache's blocks are used for, and what prefix sharing saved."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Blocks of computed prefixes that no request holds."""
    num_held_blocks: int
    total_evicted_blocks: int
    total_queried_tokens: int
    """Known tokens of the requests that looked for a computed prefix."""
    total_hit_tokens: int
    """Those of them that were found computed."""
    num_window_blocks: int = 0
    """Of layers with a sliding window, where they have blocks of their own."""
    num_held_window_blocks: int = 0
