"""The thread on which experts are promoted: woken when something changed, it lets the store decide.

Beside compute, so that no decision keeps a token waiting. Knows nothing of experts.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from thermocline.experts.store import ExpertStore


class PromotionThread:
    """Calls `store.promote` after each change. Close it before the device."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="expert promotion", daemon=True)
        store.on_change(self._changed.set)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Decide no more. Blocks for one decision; more calls do nothing."""
        self._closed = True
        self._changed.set()
        self._thread.join()

    def _work(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            if self._closed:
                return
            self._store.promote()
