"""Owns the advice thread and its queue of hints: bounded, newest first to survive, lossy by design.

Knows where experts' bytes are (through the catalog), not why they are wanted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.messages import ExpertKey
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.messages import PrefetchHint
    from thermocline.prefetch.advice import PageAdvisor
    from thermocline.prefetch.residency import ResidencyProbe
    from thermocline.traces.recorder import Recorder

# How long experts that were found in memory are believed to stay there.
_QUIET_S = 0.5


@dataclass(frozen=True, slots=True)
class PrefetchStatistics:
    """Counters since the start."""

    total_hints: int
    total_dropped: int
    total_experts: int
    total_bytes: int
    total_refused: int
    """Hints that the kernel refused (out of memory, for example); compute reads those bytes itself."""
    total_needless: int
    """Hints for bytes that were all in memory, as far as a sample of their pages tells."""


class PrefetchGovernor:
    """Takes hints without waiting and works them off on a thread of its own.

    When more than `max_hints` wait, the oldest is dropped: its layer is being computed by now. Where a
    probe finds the experts in memory, hints are ignored until it looks again.
    """

    def __init__(
        self,
        catalog: ExpertCatalog,
        advisor: PageAdvisor,
        recorder: Recorder,
        max_hints: int = 8,
        probe: ResidencyProbe | None = None,
    ) -> None:
        self._catalog = catalog
        self._advisor = advisor
        self._recorder = recorder
        self._hints: deque[PrefetchHint] = deque()
        self._max_hints = max_hints
        self._changed = threading.Condition()
        self._closed = False
        self._total_hints = self._total_dropped = self._total_experts = self._total_bytes = 0
        self._total_refused = self._total_needless = 0
        self._probe = probe
        self._quiet_until_s = 0.0
        self._thread = threading.Thread(target=self._work, name="lane pagecache", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"PrefetchGovernor({self.statistics()})"

    @property
    def is_quiet(self) -> bool:
        """Whether hints are ignored for now: all was in memory when last looked at."""
        return time.monotonic() < self._quiet_until_s

    def offer_nowait(self, hint: PrefetchHint) -> None:
        """Queue a hint; drops the oldest one instead of waiting."""
        if self.is_quiet:
            self._total_hints += 1
            self._total_needless += 1
            return
        with self._changed:
            self._total_hints += 1
            self._hints.append(hint)
            if len(self._hints) > self._max_hints:
                self._hints.popleft()
                self._total_dropped += 1
            self._changed.notify()

    def statistics(self) -> PrefetchStatistics:
        """Return the counters."""
        return PrefetchStatistics(
            self._total_hints,
            self._total_dropped,
            self._total_experts,
            self._total_bytes,
            self._total_refused,
            self._total_needless,
        )

    def close(self) -> None:
        """Drop what waits and end the thread. Blocks; more calls do nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while (hint := self._take()) is not None:
            start_ns = self._recorder.now_ns()
            try:
                if self._probe is not None and self._probe.is_resident():
                    self._total_needless += 1
                    self._quiet_until_s = time.monotonic() + _QUIET_S
                    continue
                keys = [ExpertKey(hint.layer, expert) for expert in hint.experts.tolist()]
                nbytes = sum(self._advisor.will_need(self._catalog.spans(key)) for key in keys)
            except OSError:
                self._total_refused += 1
                continue
            self._total_experts += len(keys)
            self._total_bytes += nbytes
            self._recorder.span(
                Lane.PAGECACHE,
                Name.ADVISE,
                start_ns,
                self._recorder.now_ns(),
                {"experts": len(keys), "bytes": nbytes},
            )

    def _take(self) -> PrefetchHint | None:
        with self._changed:
            while not self._hints and not self._closed:
                self._changed.wait()
            return None if self._closed else self._hints.popleft()
