"""Admits requests by the memory that they will take. Knows no route and no field.

Owns how much of the server's budget each request has.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from aiohttp import web

from thermocline.errors import BusyError

if TYPE_CHECKING:
    from collections.abc import Iterator


class MemoryBudget:
    """The bytes that all requests may take together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._total_bytes = 0
        self._num_holders = 0

    def __repr__(self) -> str:
        return f"MemoryBudget({self._total_bytes} of {self._max_bytes} bytes, {self._num_holders} holders)"

    @contextmanager
    def share(self) -> Iterator[RequestMemory]:
        """Give a request its share while the context is open."""
        share = RequestMemory(self)
        try:
            yield share
        finally:
            self.take(share, -share.num_bytes)

    def take(self, share: RequestMemory, num_bytes: int) -> None:
        """Add bytes to a request's share, or give some back.

        Raises BusyError beyond the budget, unless nobody else holds any: what one request may take is limited elsewhere.
        """
        is_alone = self._num_holders == (share.num_bytes > 0)
        if num_bytes > 0 and not is_alone and self._total_bytes + num_bytes > self._max_bytes:
            raise BusyError(
                "requests that are being answered take all the memory that there is for them: try again later"
            )
        self._num_holders -= share.num_bytes > 0
        self._total_bytes += num_bytes
        share.num_bytes += num_bytes
        self._num_holders += share.num_bytes > 0


class RequestMemory:
    """What one request has of the budget."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Take more. Raises BusyError as `MemoryBudget.take` does."""
        self._budget.take(self, num_bytes)


BUDGET: Final = web.AppKey("BUDGET", MemoryBudget)
MEMORY: Final = web.RequestKey("MEMORY", RequestMemory)
