"""Says how many cache blocks requests will hold at the worst moment to come. Pure; knows no queue and no block.

All grow by a token per step, and each leaves with its blocks when its answer ends. So the worst moments are those just
before an end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable


class Expected(NamedTuple):
    """One request: tokens that it has, and how many further ones it is taken to get.

    num_shared: of its blocks, how many others may hold too, so that they are not free when it ends.
    """

    num_tokens: int
    num_further: int
    num_shared: int = 0


def peak_blocks(requests: Iterable[Expected], block_tokens: int) -> int:
    """Return the most blocks that the requests hold together at any time. Shared ones count for each of its holders."""
    num_tokens, num_further, num_shared = np.array([*requests], np.int64).reshape(-1, 3).T
    until = num_further[:, None]  # [moments, 1]
    held = -(-(num_tokens + until) // block_tokens)  # [moments, requests]
    return int(np.where(num_further >= until, held, num_shared).sum(axis=1).max(initial=0))
