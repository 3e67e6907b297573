"""Owns the planning thread of prefetch and its bounded queue of hints, which drops the oldest.

Takes hints from compute without waiting, keeps the model of the page cache, and tells the readers what to
read and what to release. Knows neither files nor disks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from thermocline.messages import ChunkId, ExpertKey, LayerIndex
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from thermocline.messages import IntArray, PrefetchHint
    from thermocline.prefetch.cache_model import CacheModel
    from thermocline.prefetch.predictor import LayerPrediction, Predictor
    from thermocline.prefetch.readers import ReaderThreads
    from thermocline.prefetch.residency import ResidencyProbe
    from thermocline.traces.recorder import Recorder

MAX_HINTS = 64
"""Limit of queued hints; planning one takes a fraction of a layer's time."""

# How long a reading of free memory, or of the experts' residency, holds.
_LOOK_EVERY_S = 0.5
# Experts of so many layers ahead may evict others. One layer hides reading behind compute; the second keeps the
# disk busy. More would evict what the next chunk uses.
_EVICTING_LAYERS = 2
# Layers ahead that a decode step predicts. Predictions of a second layer cost more reading than they save
# waiting (docs/LOG.md).
_PREDICTED_LAYERS = 1
# A layer is not predicted of which a step will likely select fewer experts that are missing than this: where an expert
# of 3 MB is read at 0.6 GB/s, a tenth of that is about what predicting costs (docs/LOG.md).
_FEW_MISSING = 0.1
# Of the experts of a layer that is read in huge pages.
_MOSTLY = 0.75
# A prompt without a hint for so many rounds through all layers has ended early.
_FORGOTTEN_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class PrefetchStatistics:
    """Counters since the start; experts count once per layer and step."""

    total_hints: int
    total_dropped: int
    """Hints that newer ones pushed out of the queue."""
    total_needless: int
    """Hints for bytes that were all in memory, by a sample of their pages."""
    total_experts: int
    """Experts that were asked for."""
    total_bytes: int
    """Bytes brought into memory, or found there."""
    total_refused: int
    """Reads that the kernel refused, out of memory for example; compute reads those bytes itself."""
    total_hits: int
    """Selected experts that were in memory, by this process's model of it."""
    total_late: int
    """Selected experts that were queued or being read."""
    total_misses: int
    """Selected experts that were not requested before."""
    total_wasted_bytes: int
    """Bytes of experts that were requested and evicted without having been selected."""
    is_resident: bool
    """Whether all experts were in memory at the last look, by a sample of their pages."""
    layers: tuple[LayerPrediction, ...]
    """How well each layer's experts were predicted during decode."""


class _Prompt(NamedTuple):
    """Where a chunk was, at which hint, and whether more of its prompt follows."""

    layer: LayerIndex
    step: int
    continues: bool


class PrefetchGovernor:
    """Takes hints without waiting and processes them on a thread of its own.

    Of more than MAX_HINTS, the oldest is dropped: its layer is being computed by now. Where a probe finds the
    experts in memory, hints are ignored until the next probe. Where all have room and some are missing, all are read
    while nothing more urgent is. room_bytes returns how much memory the experts may take; cold: bool [layers, experts],
    those that are read from the file.
    """

    def __init__(
        self,
        cache: CacheModel,
        predictor: Predictor,
        readers: ReaderThreads,
        recorder: Recorder,
        *,
        cold: NDArray[np.bool_],
        room_bytes: Callable[[], int],
        probe: ResidencyProbe | None = None,
    ) -> None:
        self._cache = cache
        self._predictor = predictor
        self._readers = readers
        self._recorder = recorder
        self._cold = cold
        self._room_bytes = room_bytes
        self._reads_non_expert = True
        self._reads_rest = False
        self._probe = probe
        self._hints: deque[PrefetchHint] = deque()
        self._changed = threading.Condition()
        self._closed = self._planning = self._is_resident = self._is_look_wanted = False
        self._prompts: dict[ChunkId, _Prompt] = {}
        self._num_steps = 0
        self._quiet_until_s = self._look_at_s = 0.0
        self._total_hints = self._total_dropped = self._total_needless = 0
        self._total_hits = self._total_late = self._total_misses = self._total_wasted_bytes = 0
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        positions = {chunk: prompt.layer for chunk, prompt in self._prompts.items()}
        return f"PrefetchGovernor({self._cache}, {self._readers}, {positions=})"

    @property
    def is_quiet(self) -> bool:
        """Whether hints would be ignored now, since all is in memory."""
        return time.monotonic() < self._quiet_until_s

    def looks_quiet(self) -> bool:
        """Return `is_quiet`, after another look if the last one is old and found all in memory.

        Blocks for that look at some hundred pages. Who does not ask begins with hints after each pause.
        """
        if self.is_quiet or not self._is_resident:
            return self.is_quiet
        with self._changed:
            self._is_look_wanted = True
            self._changed.notify_all()
        self.wait_idle()
        return self.is_quiet

    def offer_nowait(self, hint: PrefetchHint) -> None:
        """Queue a hint; drops the oldest one instead of waiting."""
        self._total_hints += 1
        if self.is_quiet:
            self._total_needless += 1
            return
        with self._changed:
            if self._closed:
                return
            self._hints.append(hint)
            if len(self._hints) > MAX_HINTS:
                self._hints.popleft()
                self._total_dropped += 1
            self._changed.notify_all()

    def statistics(self) -> PrefetchStatistics:
        """Return the counters."""
        read = self._readers.totals()
        return PrefetchStatistics(
            total_hints=self._total_hints,
            total_dropped=self._total_dropped,
            total_needless=self._total_needless,
            total_experts=read.total_experts,
            total_bytes=read.total_bytes,
            total_refused=read.total_refused,
            total_hits=self._total_hits,
            total_late=self._total_late,
            total_misses=self._total_misses,
            total_wasted_bytes=self._total_wasted_bytes,
            is_resident=self._is_resident,
            layers=self._predictor.scores(),
        )

    def busy_ns(self) -> int:
        """Return how long the readers have worked so far. From any thread; never waits."""
        return self._readers.busy_ns()

    def wait_idle(self) -> None:
        """Block until every hint offered before is processed; reads may still be in flight."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not (self._planning or self._is_look_wanted or self._hints)
            )

    def close(self) -> None:
        """Drop queued hints and end all threads. Blocks for the reads in flight; more calls do nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._readers.close()

    def _work(self) -> None:
        try:
            while (hints := self._take()) is not None:
                self._act(hints)
        finally:
            # Also after an error, which is told as that of any thread: nobody waits for hints that nobody will take.
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _act(self, hints: list[PrefetchHint]) -> None:
        if self._looks_resident():
            self._total_needless += len(hints)
            return
        newest = {hint.chunk: hint for hint in hints}
        for hint in hints:
            self._plan(hint, is_stale=newest[hint.chunk] is not hint)
        self._count()

    def _take(self) -> list[PrefetchHint] | None:
        """Return the hints that wait, none if only a look is wanted; None once closed."""
        with self._changed:
            self._planning = False
            if not self._hints:
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._is_look_wanted or self._hints)
            hints = None if self._closed else list(self._hints)
            self._hints.clear()
            self._is_look_wanted, self._planning = False, True
            return hints

    def _looks_resident(self) -> bool:
        """Return whether all experts are in memory; updates that and the room, twice a second at most."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            # Hints that came while it looked, before it could say so.
            return self._is_resident
        self._look_at_s = now_s + _LOOK_EVERY_S
        self._cache.capacity_bytes = self._room_bytes()
        try:
            self._is_resident = self._probe is not None and self._probe.is_resident()
        except OSError:
            self._is_resident = False
        if self._is_resident:
            self._quiet_until_s = self._look_at_s
            self._reads_non_expert = True
        self._read_rest()
        return self._is_resident

    def _read_rest(self) -> None:
        """Have all experts read, or no longer; each time that they turn out to have room and not to be in memory.

        Until then each step gives hints, which costs more than its share of what is missing (docs/LOG.md).
        """
        has_room = self._cache.has_room_for(self._cold)
        if not has_room or self._is_resident:
            if self._reads_rest and not has_room:
                self._readers.read_rest(())
            self._reads_rest = False
        elif not self._reads_rest:
            self._reads_rest = True
            keys = [ExpertKey.of(*pair) for pair in np.argwhere(self._cold).tolist()]
            layers = {key.layer for key in keys if self._is_mostly_cold(key.layer)}
            self._readers.read_rest(keys, with_neighbours=layers)

    def _plan(self, hint: PrefetchHint, *, is_stale: bool) -> None:
        """Act on one hint. A stale one's layer has been computed: it only updates statistics."""
        layer, selected = hint.layer, hint.experts
        self._move(hint)
        prompts = self._prompts.values()
        self._cache.advance(
            [prompt.layer for prompt in prompts if prompt.continues],
            [prompt.layer for prompt in prompts if not prompt.continues],
        )
        self._cache.observe(layer, selected, hint.shares, hint.num_tokens if len(selected) else 0)
        if not hint.streams:
            self._predictor.observe(layer, selected)
        pending = self._readers.pending(layer)
        held = self._cache.held(layer, selected)
        missing = selected[~held]
        late = pending.intersection(_keys(layer, selected)) if pending else pending
        self._total_late += len(late)
        self._total_hits += len(selected) - len(missing) - len(late)
        self._total_misses += len(missing)
        self._cache.use(layer, selected)
        if len(selected):
            self._cancel_stale(layer, pending - late)
        if is_stale:
            return
        self._readers.read(late, 0)
        if len(missing):
            with_neighbours = hint.streams and self._is_mostly_cold(layer)
            admitted = self._fetch(layer, missing, urgency=0, with_neighbours=with_neighbours)
            # All are computed now, in this order: what there is no room for takes the place of those before it.
            rest = _keys(layer, missing[admitted:])
            self._readers.read(rest, 0, with_neighbours=with_neighbours)
            self._cache.use(layer, selected)
        if self._reads_non_expert:  # once: what every token uses stays in memory
            self._reads_non_expert = False
            self._readers.read_non_expert()
        if hint.streams:
            self._stream(hint)
        else:
            self._predict(hint)

    def _move(self, hint: PrefetchHint) -> None:
        """Note where each prompt is; one at the last layer is forgotten with the next hint."""
        self._num_steps += 1
        last = self._cache.routed_after(LayerIndex(0), -1)
        oldest = self._num_steps - _FORGOTTEN_ROUNDS * self._cache.num_routed
        self._prompts = {
            chunk: prompt
            for chunk, prompt in self._prompts.items()
            if prompt.layer < last and prompt.step >= oldest
        }
        if hint.streams:
            self._prompts[hint.chunk] = _Prompt(hint.layer, self._num_steps, hint.continues)

    def _cancel_stale(self, layer: LayerIndex, wrong: set[ExpertKey]) -> None:
        """Cancel queued reads that were wrong for this layer, or are too late for the one before."""
        stale = wrong | self._readers.pending(self._cache.routed_after(layer, -1))
        if not stale:
            return
        # A selected expert is in memory all the same: compute has read it.
        useless = [key for key in self._readers.cancel(stale) if not self._cache.was_selected(*key)]
        for key in useless:
            self._cache.forget(key.layer, key.expert)
        self._readers.release(useless)

    def _stream(self, hint: PrefetchHint) -> None:
        """Fetch all experts of the next layers, in order, as far as there is room."""
        num_routed = self._cache.num_routed
        last = num_routed if hint.continues else num_routed - self._cache.place(hint.layer)
        first = 1 if len(hint.experts) else 0
        for distance in range(first, last):
            layer = self._cache.routed_after(hint.layer, distance)
            missing = self._cache.missing(layer)
            missing = missing[self._cold[layer, missing]]
            num_fetched = self._fetch(
                layer,
                missing,
                urgency=distance,
                evict=distance <= _EVICTING_LAYERS,
                with_neighbours=self._is_mostly_cold(layer),
            )
            if num_fetched < len(missing):
                return

    def _is_mostly_cold(self, layer: LayerIndex) -> bool:
        """Whether a prompt wants nearly all of a layer's bytes, so that few others come with them in huge pages."""
        return float(self._cold[layer].mean()) >= _MOSTLY

    def _predict(self, hint: PrefetchHint) -> None:
        """Fetch what the next layers will likely select; across tokens, what was selected lately."""
        num_routed, predictor = self._cache.num_routed, self._predictor
        for distance in range(1, min(_PREDICTED_LAYERS, num_routed - 1) + 1):
            layer = self._cache.routed_after(hint.layer, distance)
            per_token = float(hint.shares.sum()) - self._cache.selected_of_held(layer)
            if per_token * hint.num_tokens < _FEW_MISSING:
                continue
            if layer > hint.layer and hint.residual is not None:
                experts = predictor.from_state(layer, hint.residual, hint.token_ids)
            else:
                experts = predictor.from_recency(layer, len(hint.experts))
            wanted = experts[self._cold[layer, experts] & ~self._cache.held(layer, experts)]
            self._fetch(layer, wanted, urgency=distance)

    def _fetch(
        self,
        layer: LayerIndex,
        experts: IntArray,
        *,
        urgency: int,
        evict: bool = True,
        with_neighbours: bool = False,
    ) -> int:
        """Request experts that are not held, as many as there is room for; returns how many."""
        if not len(experts):
            return 0
        admission = self._cache.admit(layer, experts, evict=evict)
        gone = [ExpertKey.of(*pair) for pair in admission.evicted.tolist()]
        self._total_wasted_bytes += admission.unused_bytes
        self._readers.cancel(gone)
        self._readers.release(gone)
        keys = _keys(layer, admission.experts)
        self._readers.read(keys, urgency, with_neighbours=with_neighbours)
        return len(admission.experts)

    def _count(self) -> None:
        if not self._recorder.enabled:
            return
        at_ns = self._recorder.now_ns()
        counters = (
            (Name.HIT, self._total_hits),
            (Name.LATE, self._total_late),
            (Name.MISS, self._total_misses),
            (Name.WASTED, self._total_wasted_bytes),
        )
        for name, value in counters:
            self._recorder.counter(f"{Name.PREFETCH} {name}", value, at_ns)


def _keys(layer: LayerIndex, experts: IntArray) -> list[ExpertKey]:
    return [ExpertKey.of(layer, expert) for expert in experts.tolist()]
