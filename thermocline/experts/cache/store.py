"""Owns the experts on a device: their slots, their leases, and the copies in flight.

Routers read a layer's residency, a frozen row, and take leases; a leased expert keeps its slot until the release.
`promote` carries out the policy's moves: it evicts unused experts and begins copies. Knows neither why an expert is
worth a slot nor what a device is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import DeviceMemoryError
from thermocline.experts.cache.store_statistics import StoreStatistics
from thermocline.experts.placement.placement import Placement
from thermocline.messages import ExpertKey, LayerIndex, Lease
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from thermocline.experts.backends.contract import SlotDevice
    from thermocline.experts.cache.policy import CachePolicy
    from thermocline.messages import IntArray, Routing
    from thermocline.traces.recorder import Recorder

# Copies in flight: enough to keep the link busy, few enough that decisions stay fresh.
_MAX_COPIES: Final = 4
# Steps whose choices are queued for the policy; older ones are dropped.
_MAX_QUEUED_STEPS: Final = 2


class ExpertStore:
    """Experts on one device.

    expert_bytes: of one expert, by layer, 0 where a layer has none.
    """

    def __init__(
        self,
        expert_bytes: Sequence[int],
        num_experts: int,
        device: SlotDevice,
        policy: CachePolicy,
        capacity_bytes: int,
        recorder: Recorder,
    ) -> None:
        self._expert_bytes = tuple(expert_bytes)
        self._num_experts = num_experts
        self._device = device
        self._recorder = recorder
        self._copied: Callable[[], None] | None = None
        self._step_ended: Callable[[], bool] | None = None
        self._collects = True  # whether this step's choices are queued for the policy
        # Guards the policy. Taken before `_lock`, never after it.
        self._deciding = threading.Lock()
        self._policy = policy
        self._queued_choices: deque[tuple[LayerIndex, IntArray]] = deque(
            maxlen=_MAX_QUEUED_STEPS * len(expert_bytes)
        )
        # Guards all that follows; held for microseconds.
        self._lock = threading.Lock()
        # Slot of each expert, -1 for none. Rows are replaced, never written: readers need no lock.
        absent = np.full(num_experts, -1, np.int32)
        absent.flags.writeable = False
        self._rows: list[IntArray] = [absent] * len(self._expert_bytes)
        self._leases = np.zeros((len(self._expert_bytes), num_experts), np.int32)
        self._num_holds = 0  # holds of all experts at once
        self._num_all = num_experts * sum(nbytes > 0 for nbytes in self._expert_bytes)
        self._copying: dict[ExpertKey, int] = {}
        # Evicted while being copied: freed when the copy ends.
        self._unwanted: set[ExpertKey] = set()
        # Evicted while leased: freed at the release.
        self._leaving: dict[ExpertKey, int] = {}
        self._ended: deque[tuple[ExpertKey, bool]] = deque()
        self._pinned: frozenset[ExpertKey] = frozenset()
        self._kept_away = np.zeros((len(self._expert_bytes), num_experts), bool)
        self._capacity_bytes = capacity_bytes
        # What `change_slots` did and the policy does not know yet: experts that went, and each layout's bytes.
        self._gone: deque[ExpertKey] = deque()
        self._shares: Mapping[str, int] | None = None
        self._used_bytes = self._num_resident = 0
        self._choices = self._hits = self._staged = 0
        self._uploads = self._evictions = self._staged_experts = self._upload_bytes = 0

    def __repr__(self) -> str:
        return (
            f"ExpertStore({self._num_resident} experts, {self._used_bytes} of {self._capacity_bytes} "
            f"bytes, {len(self._copying)} being copied)"
        )

    def routed_after(self, layer: LayerIndex) -> LayerIndex | None:
        """Return the next layer with experts; None behind the last one."""
        later = range(layer + 1, len(self._expert_bytes))
        return next((LayerIndex(n) for n in later if self._expert_bytes[n]), None)

    @property
    def is_empty(self) -> bool:
        """Whether no expert is on the device."""
        return not self._num_resident

    @property
    def is_full(self) -> bool:
        """Whether all experts of all layers are on the device."""
        return self._num_resident == self._num_all

    def hold_all(self) -> tuple[IntArray, ...] | None:
        """`hold` if all experts of all layers are there; None unless full."""
        with self._lock:
            return self._hold() if self.is_full else None

    def hold(self) -> tuple[IntArray, ...]:
        """Keep all slots as they are until `let_go`, and return each layer's `residency`.

        Experts that are evicted meanwhile give up their slots then; copies go on, to free slots.
        """
        with self._lock:
            return self._hold()

    def _hold(self) -> tuple[IntArray, ...]:
        self._num_holds += 1
        return tuple(self._rows)

    def let_go(self) -> None:
        """End one hold."""
        with self._lock:
            self._num_holds -= 1
            if not self._num_holds:
                for key in list(self._leaving):
                    self._free_unused(key)

    def count_hits(self, num_choices: int) -> None:
        """Count choices of resident experts that were computed without a lease."""
        with self._lock:
            self._hits += num_choices

    def count_streamed(self, layer: LayerIndex, num_choices: int, num_experts: int) -> None:
        """Count a layer's choices that were copied for them alone, and all experts that were."""
        with self._lock:
            self._count_staged(layer, num_choices, num_experts)

    def _count_staged(self, layer: LayerIndex, num_choices: int, num_experts: int) -> None:
        self._staged += num_choices
        self._staged_experts += num_experts
        self._upload_bytes += num_experts * self._expert_bytes[layer]

    def on_change(self, copied: Callable[[], None], step_ended: Callable[[], bool]) -> None:
        """Call `copied` after each copy and `step_ended` after each step, from any thread.

        `step_ended` returns whether the next step's choices are queued for the policy. Without callbacks nothing is
        promoted.
        """
        self._copied, self._step_ended = copied, step_ended

    def residency(self, layer: LayerIndex) -> IntArray:
        """Return the slot of each of the layer's experts, -1 for none: int32 [E], frozen."""
        return self._rows[layer]

    def lease(
        self,
        layer: LayerIndex,
        experts: IntArray,
        counts: IntArray,
        hits: NDArray[np.bool_],
        uploads: NDArray[np.bool_],
    ) -> tuple[NDArray[np.bool_], Lease | None]:
        """Lease experts of a layer; return which, and the lease unless there are none.

        experts, counts: int32 [n], ascending, and how many tokens chose each. hits: bool [n], to lease if still
        resident. uploads: bool [n], to lease if resident, else to upload for this work alone.
        """
        with self._lock:
            slots = self._rows[layer][experts]
            resident = slots >= 0
            held, staged = resident & (hits | uploads), uploads & ~resident
            leased = experts[held]
            self._leases[layer, leased] += 1
            self._hits += int(counts[held].sum())
            self._count_staged(layer, int(counts[staged].sum()), int(np.count_nonzero(staged)))
        mine = held | staged
        if not mine.any():
            return mine, None
        return mine, Lease(slots[mine], partial(self._release, layer, [leased]))

    def observe(self, layer: LayerIndex, routing: Routing, *, is_step_end: bool) -> None:
        """Take note of a layer's choices, from one thread. is_step_end: of the step's last layer."""
        self._choices += routing.expert_ids.size
        if self._step_ended is not None and self._expert_bytes[layer]:
            if self._collects:
                self._queued_choices.append((layer, routing.expert_ids))
            if is_step_end:
                self._collects = self._step_ended()

    def observe_step(self, layers: IntArray, expert_ids: IntArray) -> None:
        """Take note of the choices of a step's layers int32 [n] at once: int32 [n, T, K]."""
        self._choices += expert_ids.size
        if self._step_ended is not None:
            if self._collects:
                self._queued_choices.extend(
                    zip(map(LayerIndex, layers.tolist()), expert_ids, strict=True)
                )
            self._collects = self._step_ended()

    def bind(self, pinned: Collection[ExpertKey], kept_away: NDArray[np.bool_]) -> None:
        """Set the user's constraints, before the first copy.

        pinned: experts that are evicted only when memory must be freed. kept_away: bool [layers, experts], those that
        are never copied.
        """
        self._pinned, self._kept_away = frozenset(pinned), kept_away

    def may_come(self, layer: LayerIndex, experts: IntArray) -> NDArray[np.bool_]:
        """Return bool [n], which of a layer's experts [n] the device may hold."""
        allowed: NDArray[np.bool_] = ~self._kept_away[layer, experts]
        return allowed

    def install(self, keys: Iterable[ExpertKey]) -> None:
        """Copy experts to the device at the start, as many as fit. Blocks until they are there."""
        with self._deciding:
            copies = [copy for key in keys if (copy := self._begin(key)) is not None]
        for copy in copies:
            copy.result()
        with self._deciding:
            self._report()

    def promote(self, *, listens: bool = True) -> bool:
        """Report to the policy, and begin the copies that it wants; from one thread.

        listens: report choices too, which takes some 0.1 ms per layer. Returns whether a copy was begun.
        """
        num_begun = 0
        with self._deciding:
            self._report(listens=listens)
            while len(self._copying) < _MAX_COPIES:
                move = self._policy.next_move(self._in_use())
                if move is None:
                    break
                if not self._evict_all(move.evict):
                    self._policy.dropped(move.install)
                    break
                if self._begin(move.install) is None:
                    break
                num_begun += 1
        return num_begun > 0

    def resize(self, capacity_bytes: int) -> int:
        """Change the capacity, evict what exceeds it, and return the bytes that were freed at once.

        Leased experts are freed at their release, copies in flight when they end.
        """
        with self._deciding:
            return self._resize(capacity_bytes)

    def give_up(self, nbytes: int | None) -> bool:
        """Shrink the capacity by so many bytes (None: all) for other uses; return whether they are free now.

        Leased experts are not free at once, so more experts may be evicted.
        """
        with self._deciding:
            capacity, freed = self._used_bytes, 0
            nbytes = capacity if nbytes is None else nbytes
            while freed < nbytes and capacity:
                capacity = max(0, capacity - (nbytes - freed))
                freed += self._resize(capacity)
            return freed >= nbytes

    def change_slots(self, change: Callable[[], tuple[range, Mapping[str, int]]]) -> None:
        """Let the device have other slots from now on, and evict what lies in those that it loses. Never waits.

        change: makes the change and returns the slots that are no longer given out, and the bytes of experts for which
        each layout has slots. Those in use are freed at their release, or when their copies end.
        """
        with self._lock:
            lost, shares = change()
            self._shares, self._capacity_bytes = shares, sum(shares.values())
            inside = [key for key, slot in self._copying.items() if slot in lost]
            self._unwanted.update(inside)
            for layer, row in enumerate(self._rows):
                for expert in np.flatnonzero((row >= lost.start) & (row < lost.stop)).tolist():
                    inside.append(ExpertKey.of(layer, expert))
                    self._evict(inside[-1])
            self._gone += inside
        self._count()
        if self._copied is not None:
            self._copied()

    def placement(self) -> Placement:
        """Return which experts are on the device now."""
        hot = tuple(tuple(np.flatnonzero(row >= 0).tolist()) for row in self._rows)
        dense = frozenset(n for n, nbytes in enumerate(self._expert_bytes) if not nbytes)
        return Placement(self._num_experts, hot, dense)

    def statistics(self) -> StoreStatistics:
        """Return the counters."""
        with self._lock:
            return StoreStatistics(
                total_hits=self._hits,
                total_staged=self._staged,
                total_misses=max(0, self._choices - self._hits - self._staged),
                total_uploads=self._uploads,
                total_evictions=self._evictions,
                total_staged_experts=self._staged_experts,
                total_upload_bytes=self._upload_bytes,
                num_resident=self._num_resident,
                num_copying=len(self._copying),
                resident_bytes=self._used_bytes,
                capacity_bytes=self._capacity_bytes,
                reason=self._policy.reason,
            )

    def check_integrity(self, *, idle: bool = False) -> None:
        """Assert that slots, leases and sizes fit each other; idle: and that nothing is leased."""
        with self._lock:
            resident = self._residents()
            taken = [*resident.items(), *self._copying.items(), *self._leaving.items()]
            keys = [key for key, _ in taken]
            assert len(set(keys)) == len(keys), "an expert has two slots"
            used = sum(self._expert_bytes[key.layer] for key in keys)
            assert used == self._used_bytes, f"{used} bytes are used, {self._used_bytes} counted"
            assert self._leaving or self._unwanted or used <= self._capacity_bytes, (
                "more is used than there is room for"
            )
            assert len(resident) == self._num_resident, "residents were not counted"
            leased = {ExpertKey.of(*pair) for pair in np.argwhere(self._leases).tolist()}
            assert leased <= resident.keys() | self._leaving.keys(), "a leased expert is gone"
            assert (self._leases >= 0).all(), "a lease was given back twice"
            assert not (idle and leased), f"still leased: {leased}"
            assert not (idle and self._num_holds), "everything is still held"

    def _release(self, layer: LayerIndex, leased: list[IntArray]) -> None:
        """Give back a lease's experts, which are taken from the list: a second call does nothing."""
        with self._lock:
            if not leased:
                return
            self._leases[layer, leased.pop()] -= 1
            for key in [key for key in self._leaving if key.layer == layer]:
                self._free_unused(key)

    def _in_use(self) -> frozenset[ExpertKey]:
        with self._lock:
            leased = [ExpertKey.of(*pair) for pair in np.argwhere(self._leases).tolist()]
            return self._pinned.union(leased, self._copying, self._leaving)

    def _report(self, *, listens: bool = True) -> None:
        """Report ended copies and queued choices to the policy."""
        while self._ended:
            key, arrived = self._ended.popleft()
            if not arrived:
                self._policy.dropped(key)
            elif self._rows[key.layer][key.expert] >= 0:  # else it was evicted since
                self._policy.installed(key)
        while self._gone:
            key = self._gone.popleft()
            is_coming = key in self._copying and key not in self._unwanted
            if self._rows[key.layer][key.expert] < 0 and not is_coming:
                self._policy.dropped(key)
        with self._lock:
            shares, self._shares = self._shares, None
        if shares is not None:
            self._shrink(sum(shares.values()), shares)
        while listens and self._queued_choices:
            layer, chosen_ids = self._queued_choices.popleft()
            counts = np.bincount(chosen_ids.reshape(-1), minlength=self._num_experts)
            counts[self._kept_away[layer]] = 0
            experts = np.flatnonzero(counts).astype(np.int32)
            chosen = counts[experts].astype(np.int32)
            self._policy.observe(layer, experts, chosen, len(chosen_ids))
            time.sleep(0)  # let threads that compute have the interpreter

    def _evict_all(self, keys: Sequence[ExpertKey]) -> bool:
        """Evict all of them, or none where one was leased meanwhile."""
        with self._lock:
            if any(self._leases[key] for key in keys):
                return False
            # Others lost their slots just now, which the policy is told with the next report.
            there = [key for key in keys if self._rows[key.layer][key.expert] >= 0]
            for key in there:
                self._evict(key)
        for key in there:
            self._policy.dropped(key)
        return True

    def _evict(self, key: ExpertKey) -> None:
        """Evict a resident expert; a leased one keeps its slot until the release. Needs the lock."""
        slot = int(self._rows[key.layer][key.expert])
        assert slot >= 0, f"{key} is not on the device"
        self._set_row(key, -1)
        self._num_resident -= 1
        self._evictions += 1
        self._leaving[key] = slot
        self._free_unused(key)
        if self._recorder.enabled:
            args = {"layer": key.layer, "expert": key.expert}
            self._recorder.instant(Lane.GPU_H2D, Name.EVICT, self._recorder.now_ns(), args)

    def _free_unused(self, key: ExpertKey) -> None:
        """Free the slot of an evicted expert unless it is in use. Needs the lock."""
        if not (self._leases[key] or self._num_holds):
            self._free(key, self._leaving.pop(key))

    def _begin(self, key: ExpertKey) -> Future[None] | None:
        """Begin a copy; None where there is no room. A full device lowers the capacity to what is in use."""
        nbytes = self._expert_bytes[key.layer]
        with self._lock:
            is_leaving = key in self._leaving or key in self._unwanted
            has_room = self._used_bytes + nbytes <= self._capacity_bytes
            # Until the policy knows of changed slots, what it wants may have no place.
            may_begin = has_room and not is_leaving and self._shares is None
            slot = None
            if may_begin:
                # In one with the note of it: the slot may be lost from now on.
                with suppress(DeviceMemoryError):
                    slot = self._copying[key] = self._device.allocate(key.layer)
                    self._used_bytes += nbytes
        if not may_begin:
            self._policy.dropped(key)
            return None
        if slot is None:
            self._policy.dropped(key)
            self._resize(self._used_bytes)
            return None
        copy = self._device.begin_copy(key, slot)
        copy.add_done_callback(partial(self._end, key, slot))
        return copy

    def _end(self, key: ExpertKey, slot: int, copy: Future[None]) -> None:
        """Take note of an ended copy, on its thread."""
        with self._lock:
            del self._copying[key]
            is_wanted = key not in self._unwanted
            is_there = is_wanted and copy.exception() is None
            if is_there:
                self._set_row(key, slot)
                self._num_resident += 1
                self._uploads += 1
                self._upload_bytes += self._expert_bytes[key.layer]
            else:
                self._unwanted.discard(key)
                self._free(key, slot)
        if is_wanted:
            self._ended.append((key, is_there))
        self._count()
        if self._copied is not None:
            self._copied()

    def _resize(self, capacity_bytes: int) -> int:
        self._report()
        return self._shrink(capacity_bytes)

    def _shrink(self, capacity_bytes: int, shares: Mapping[str, int] | None = None) -> int:
        """Tell the policy of the capacity, evict what exceeds it, and return the bytes that were freed at once."""
        keys = self._policy.resize(capacity_bytes, shares)
        with self._lock:
            if self._shares is None:  # else it was changed since
                self._capacity_bytes = capacity_bytes
            before = self._used_bytes
            for key in keys:
                if key in self._copying:
                    self._unwanted.add(key)
                elif self._rows[key.layer][key.expert] >= 0:
                    self._evict(key)
            freed = before - self._used_bytes
        for key in keys:
            self._policy.dropped(key)
        self._count()
        return freed

    def _residents(self) -> dict[ExpertKey, int]:
        return {
            ExpertKey.of(layer, expert): int(row[expert])
            for layer, row in enumerate(self._rows)
            for expert in np.flatnonzero(row >= 0).tolist()
        }

    def _set_row(self, key: ExpertKey, slot: int) -> None:
        row = self._rows[key.layer].copy()
        row[key.expert] = slot
        row.flags.writeable = False
        self._rows[key.layer] = row

    def _free(self, key: ExpertKey, slot: int) -> None:
        self._used_bytes -= self._expert_bytes[key.layer]
        self._device.free(key.layer, slot)

    def _count(self) -> None:
        if self._recorder.enabled:
            at_ns = self._recorder.now_ns()
            self._recorder.counter(Name.RESIDENT_BYTES, self._used_bytes, at_ns)
