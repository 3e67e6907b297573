"""Tells the governor where each chunk is and what it selected, beside the compute that will read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.messages import BackendRole, LayerWork, PrefetchHint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.kernels.whole_layer import OnRouted
    from thermocline.messages import Chunk, FloatArray, Hidden, IntArray, LayerIndex
    from thermocline.models.router_rule import RouterRule
    from thermocline.prefetch.governor import PrefetchGovernor

_NONE = np.empty(0, np.int32)


class PrefetchStage:
    """LayerWork, or the Hidden of a chunk that starts -> a hint. Nothing flows on from here."""

    def __init__(
        self,
        governor: PrefetchGovernor,
        rule: RouterRule,
        roles: tuple[BackendRole, ...] = (BackendRole.COLD,),
    ) -> None:
        """roles: whose experts are, or may be, computed from this process's file."""
        self._governor = governor
        self._roles = roles
        # From here on most experts of a layer are selected: 64 % if tokens choose independently. 0 without experts.
        self._streaming_tokens = rule.num_experts / max(rule.num_experts_used, 1)

    async def __call__(self, message: Hidden | LayerWork) -> None:
        """Offer the hint without waiting."""
        experts, counts, stream = _NONE, _NONE, None
        if isinstance(message, LayerWork):
            work = message.dispatches
            chosen = [work[role] for role in self._roles if role in work]
            if not chosen:
                return
            experts = np.concatenate([share.experts for share in chosen])
            counts = np.concatenate([share.counts for share in chosen])
            if len(chosen) > 1:
                order = np.argsort(experts)
                experts, counts = experts[order], counts[order]
            stream = message.stream
        self._offer(message.chunk, message.layer, experts, counts, stream)

    def on_routed(self, chunk: Chunk, layer: LayerIndex) -> OnRouted | None:
        """Return what offers a layer's hint while one job computes it; None while hints are ignored.

        For chunks of which this process computes all experts.
        """
        if self._governor.is_quiet:
            return None

        def offer(expert_ids: IntArray, stream: FloatArray) -> None:
            experts, counts = np.unique(expert_ids, return_counts=True)
            self._offer(chunk, layer, experts, counts, stream)

        return offer

    def _offer(
        self,
        chunk: Chunk,
        layer: LayerIndex,
        experts: IntArray,
        counts: NDArray[np.integer],
        stream: FloatArray | None,
    ) -> None:
        streams = chunk.num_tokens >= self._streaming_tokens
        continues = not len(chunk.logits_rows)
        shares = (counts / max(chunk.num_tokens, 1)).astype(np.float32)
        of_chunk = chunk.id, layer, experts, shares, chunk.num_tokens, streams, continues
        tells = (None, None) if streams else (stream, chunk.token_ids)
        self._governor.offer_nowait(PrefetchHint(*of_chunk, *tells))
