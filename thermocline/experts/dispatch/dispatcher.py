"""Decides which backend computes which of a layer's chosen experts: by a fixed placement, or by what a device holds.

The router asks for every layer of every chunk. Knows no stage, and nothing of how a backend computes.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from thermocline.experts.dispatch.grouping import chosen_experts, dispatch, owners_of
from thermocline.messages import ExpertKey, LayerIndex

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from thermocline.experts.cache.look_ahead import LookAhead
    from thermocline.experts.cache.store import ExpertStore
    from thermocline.experts.dispatch.offload_selector import ChunkTimes
    from thermocline.experts.dispatch.split_rules import SplitRule
    from thermocline.experts.placement.placement import Placement
    from thermocline.messages import BackendRole, Chunk, ExpertDispatch, IntArray, Lease, Routing

Dispatches: TypeAlias = "Mapping[BackendRole, ExpertDispatch]"


class ExpertDispatcher(Protocol):
    """Gives each backend its token-expert pairs. Called from the lane that routes."""

    def is_left_to_cpu(self, num_tokens: int) -> bool:
        """Whether the CPU computes all of a chunk of so many tokens: others have nothing to do, or slow it down."""
        ...

    def dispatch(
        self, chunk: Chunk, layer: LayerIndex, routing: Routing
    ) -> tuple[Dispatches, Lease | None]:
        """Return each backend's dispatch of a layer, and the lease of the hot one where it needs one."""
        ...

    def computed_here(self, chunk: Chunk, layer: LayerIndex) -> None:
        """Take note of a layer that the CPU computed whole, without a dispatch."""
        ...

    def step_computed_here(self, chunk: Chunk, ended_ns: NDArray[np.int64]) -> None:
        """Take note of a decode step that the CPU computed whole. ended_ns: when each layer was, int64 [layers], monotonic."""
        ...


class StaticDispatcher:
    """`ExpertDispatcher` of a placement that never changes.

    remote_mask: bool [layers, experts], what workers compute. times: decide by chunk whether workers are used;
    without them they always are.
    """

    def __init__(
        self,
        placement: Placement,
        remote_mask: NDArray[np.bool_] | None = None,
        times: ChunkTimes | None = None,
    ) -> None:
        masks = [placement.hot_mask(LayerIndex(n)) for n in range(len(placement.hot))]
        self._owners = [owners_of(hot) for hot in masks]
        self._offloaded = self._owners
        if remote_mask is not None:
            self._offloaded = [owners_of(*of) for of in zip(masks, remote_mask, strict=True)]
        self._times = times

    def is_left_to_cpu(self, num_tokens: int) -> bool:
        return self._times is not None and not self._times.selector.offloads(num_tokens)

    def dispatch(
        self, chunk: Chunk, layer: LayerIndex, routing: Routing
    ) -> tuple[Dispatches, Lease | None]:
        offloads = _offloads(self._times, chunk, layer)
        return dispatch(routing, (self._offloaded if offloads else self._owners)[layer]), None

    def computed_here(self, chunk: Chunk, layer: LayerIndex) -> None:
        if self._times is not None:
            self._times.note(chunk, layer, offloaded=False)

    def step_computed_here(self, chunk: Chunk, ended_ns: NDArray[np.int64]) -> None:
        _note_step_here(self._times, chunk, ended_ns)


class CacheDispatcher:
    """`ExpertDispatcher` of the experts that a device holds now.

    rule: chooses what the device computes. min_upload_tokens: chunks of
    fewer tokens upload nothing for themselves. remote_mask: bool [layers, experts], what workers compute unless it is
    resident. times: as for `StaticDispatcher`. ahead: what is copied before its layer is routed.
    """

    def __init__(
        self,
        store: ExpertStore,
        rule: SplitRule,
        min_upload_tokens: float = inf,
        remote_mask: NDArray[np.bool_] | None = None,
        times: ChunkTimes | None = None,
        ahead: LookAhead | None = None,
    ) -> None:
        self._times = times
        self._store = store
        self._rule = rule
        self._ahead = ahead
        self._min_upload_tokens = min_upload_tokens
        self._remote_mask = remote_mask

    @property
    def min_upload_tokens(self) -> float:
        """The fewest tokens of a chunk that uploads experts for itself; inf for none."""
        return self._min_upload_tokens

    def is_left_to_cpu(self, num_tokens: int) -> bool:
        uploads = num_tokens >= self._min_upload_tokens
        if self._remote_mask is None and self._store.is_empty and not uploads:
            return True
        return self._times is not None and not self._times.selector.offloads(num_tokens)

    def dispatch(
        self, chunk: Chunk, layer: LayerIndex, routing: Routing
    ) -> tuple[Dispatches, Lease | None]:
        offloads = _offloads(self._times, chunk, layer)
        slots = self._store.residency(layer)
        experts, counts = chosen_experts(routing, len(slots))
        if offloads:
            arriving = self._arriving(chunk, layer, experts)
            hits, uploads = self._rule.split(layer, slots[experts] >= 0, counts, arriving)
            uploads = uploads & self._store.may_come(layer, experts)
        else:
            hits = uploads = np.zeros(len(experts), bool)
        hot, lease = self._store.lease(layer, experts, counts, hits, uploads)
        if lease is not None and chunk.is_prompt:
            lease = replace(lease, ahead=self._next_experts(chunk, self._store.routed_after(layer)))
        hot_mask = np.zeros(len(slots), bool)
        hot_mask[experts] = hot
        remote_mask = None if self._remote_mask is None else self._remote_mask[layer]
        return dispatch(routing, owners_of(hot_mask, remote_mask)), lease

    def computed_here(self, chunk: Chunk, layer: LayerIndex) -> None:
        if self._times is not None:
            self._times.note(chunk, layer, offloaded=False)

    def step_computed_here(self, chunk: Chunk, ended_ns: NDArray[np.int64]) -> None:
        _note_step_here(self._times, chunk, ended_ns)

    def computed_step(self, chunk: Chunk, first_s: float, last_s: float) -> None:
        """Take note of a decode step that the device and the CPU computed together; see `ChunkTimes.note_step`."""
        if self._times is not None:
            self._times.note_step(chunk, first_s, last_s, offloaded=True)

    def _arriving(self, chunk: Chunk, layer: LayerIndex, experts: IntArray) -> NDArray[np.bool_]:
        """Return which of a layer's experts were copied ahead, or are being copied: bool [n]."""
        ahead = () if self._ahead is None else self._ahead.experts(chunk.id, layer)
        return np.isin(experts, ahead) if ahead else np.zeros(len(experts), bool)

    def _next_experts(self, chunk: Chunk, layer: LayerIndex | None) -> tuple[ExpertKey, ...]:
        """Return the experts of a layer, None for no layer, that are copied before it is routed."""
        if self._ahead is None or layer is None:
            return ()
        slots = self._store.residency(layer)
        may_come = self._store.may_come(layer, np.arange(len(slots), dtype=np.int32))
        if self._remote_mask is not None:
            may_come = may_come & ~self._remote_mask[layer]
        absent = np.flatnonzero(may_come & (slots < 0))
        num_experts = int(np.count_nonzero(may_come))
        if not self._rule.copies_ahead(layer, chunk.num_tokens, num_experts, len(absent)):
            return ()
        return tuple(ExpertKey.of(layer, expert) for expert in absent.tolist())


def _offloads(times: ChunkTimes | None, chunk: Chunk, layer: LayerIndex) -> bool:
    """Return whether a layer's experts are offloaded, and note when it was routed."""
    if times is None:
        return True
    offloads = times.offloads(chunk)
    times.note(chunk, layer, offloaded=offloads)
    return offloads


def _note_step_here(times: ChunkTimes | None, chunk: Chunk, ended_ns: NDArray[np.int64]) -> None:
    if times is not None:
        times.note_step(
            chunk, float(ended_ns[0]) * 1e-9, float(ended_ns[-1]) * 1e-9, offloaded=False
        )
