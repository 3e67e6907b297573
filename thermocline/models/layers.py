"""The parts of a layer that architectures share, made of kernels: rotary tables, attention, routing.

Each function treats every token by itself, so that results do not depend on the chunk.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.cache_format import copy_cache
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.dense_contract import Activation, Attending, RopeTable
from thermocline.kernels.whole_layer import AttentionWeights, HandedOn, HeadIndexer
from thermocline.messages import LayerEnding, Routing
from thermocline.models.block_attention import ask_blocks
from thermocline.models.head_blocks import ask_by_heads
from thermocline.models.norms import norm_rows
from thermocline.models.routing import Routed
from thermocline.models.streams import narrow, widen

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.kernels.cache_format import CacheShape
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import DenseKernels, LayerCache, PostNorm
    from thermocline.kernels.stream_weights import AnyMixer
    from thermocline.kernels.weight import FloatArray, IntArray, Weight
    from thermocline.kernels.whole_layer import (
        BlockIndexer,
        LayerEmbedding,
        LayerParts,
        MoeWeights,
        OnRouted,
        OutputGate,
        SharedExpert,
    )
    from thermocline.kv.cache import SequenceCache
    from thermocline.messages import CachePlaces, Chunk, LayerIndex
    from thermocline.models.block_attention import AskedBlocks
    from thermocline.models.contract import Model
    from thermocline.models.head_blocks import AskedByHeads
    from thermocline.models.rope import RopeRule


# Positions of the first table; it doubles as contexts grow.
_FIRST_POSITIONS = 1024


class RotaryTable:
    """Cosines and sines by position, computed once; the table grows with the largest position.

    Used by one thread at a time.
    """

    def __init__(self, dense: DenseKernels, rule: RopeRule) -> None:
        self._dense = dense
        self._frequencies = rule.frequencies()
        self._magnitude, self._pairs = rule.magnitude, rule.pairs
        self._rows = self._make(np.zeros(0, np.int32))
        self._last: tuple[IntArray, RopeTable] | None = None

    def at(self, positions: IntArray) -> RopeTable:
        """Return the rows [tokens, num_dims / 2] of these positions.

        Every layer of a chunk asks with the same array, which must not change in between.
        """
        if self._last is None or self._last[0] is not positions:
            self._last = positions, self.look_up(positions)
        return self._last[1]

    def up_to(self, num_positions: int) -> RopeTable:
        """Return the table of so many positions, or more."""
        self._grow(num_positions)
        return self._rows

    def look_up(self, positions: IntArray) -> RopeTable:
        """Return the same rows of positions that nobody asks for again."""
        self._grow(int(positions.max(initial=-1)) + 1)
        rows = self._rows
        return RopeTable(rows.cosines[positions], rows.sines[positions], self._pairs)

    def _grow(self, needed: int) -> None:
        known = len(self._rows.cosines)
        if needed > known:
            more = np.arange(known, max(needed, 2 * known, _FIRST_POSITIONS), dtype=np.int32)
            grown = self._make(more)
            self._rows = RopeTable(
                np.concatenate((self._rows.cosines, grown.cosines)),
                np.concatenate((self._rows.sines, grown.sines)),
                self._pairs,
            )

    def _make(self, positions: IntArray) -> RopeTable:
        return self._dense.rope_table(
            positions, self._frequencies, magnitude=self._magnitude, pairs=self._pairs
        )


def begin_attention(
    kernels: Kernels,
    parts: LayerParts,
    rope: RopeTable,
    chunk: Chunk,
    x: FloatArray,
    cache: LayerCache,
    turns_at: Callable[[IntArray], RopeTable] | None = None,
) -> Callable[[], FloatArray]:
    """Append the chunk's keys and values to `cache`; return what gives x [T, D] plus a layer's attention over it.

    In between, others may write what this chunk's tokens see. Where the layer hands something on, it gives float32 [T, 2 D],
    that behind each row; for `route`. Of weights with `NO_NORM` it gives attention alone. turns_at: rotary embedding at other
    positions, for an indexer.
    """
    weights, handed_on = parts.mixer, parts.handed_on
    assert isinstance(weights, AttentionWeights), "states have no keys and values"
    dense, prompt, normed = kernels.dense, chunk.is_prompt, x
    if len(weights.norm):
        normed = norm_rows(dense, x, weights.norm, weights.head_norm.epsilon, weights.centering)
    q, *rest = kernels.multiply_all(_distinct(weights), normed, prompt=prompt)
    gates = None
    if weights.gate is not None:
        q, gates = _split_gates(kernels, weights.gate, q, normed, cache, prompt)
    q, *rest = _heads(dense, weights, (q, *rest), cache.shape)
    k, v = (rest[0], rest[-1]) if rest else (None, None)
    places = chunk.places(window=weights.window > 0)
    dense.prepare_heads(q, k, v, weights.head_norm, rope, cache, places.slots)
    copy_for_branches(cache, places)
    asked: AskedBlocks | AskedByHeads | None = None
    if weights.indexer is not None:
        assert turns_at is not None, "an indexer turns at other positions"
        asked = _ask(kernels, weights.indexer, normed, (rope, turns_at), chunk, cache)

    def finish() -> FloatArray:
        rule = Attending(
            weights.scale,
            window=weights.window,
            sinks=weights.sinks,
            chunked=weights.chunked,
            temperature=weights.temperature,
            chosen=None if asked is None else asked.chosen(dense, chunk, cache),
        )
        attended = dense.attention(q, chunk.positions, places.segments, cache, rule, prompt=prompt)
        if weights.gate is not None and gates is not None:
            rows = attended.reshape(-1, attended.shape[-1])
            attended = dense.gate(rows, gates, weights.gate.activation)
        attended = attended.reshape(len(x), -1)
        add = x if weights.post_norm is None and len(weights.norm) else None
        out = kernels.matmul(weights.output, attended, add=add, prompt=prompt)
        if weights.output_bias is not None:
            out += weights.output_bias
        if handed_on:
            return np.concatenate((out, normed if handed_on is HandedOn.NORMED else x), axis=1)
        norm = weights.post_norm
        return out if norm is None else dense.add_normed(x, out, None, norm)

    return finish


def _ask(
    kernels: Kernels,
    indexer: BlockIndexer | HeadIndexer,
    normed: FloatArray,
    turns: tuple[RopeTable, Callable[[IntArray], RopeTable]],
    chunk: Chunk,
    cache: LayerCache,
) -> AskedBlocks | AskedByHeads:
    if isinstance(indexer, HeadIndexer):
        return ask_by_heads(kernels, indexer, normed, turns[0], chunk, cache)
    return ask_blocks(kernels, indexer, normed, turns, chunk, cache)


def copy_for_branches(cache: LayerCache, places: CachePlaces) -> None:
    """Copy what several branches see to where each looks for it, once the chunk's own keys and values are there."""
    if places.copies is not None:
        copy_cache(cache.shape, cache.keys, cache.values, places.copies, cache.index)


def _distinct(weights: AttentionWeights) -> tuple[Weight, ...]:
    """Return q alone, q and k where values are the keys, or q, k and v."""
    if weights.k is None or weights.v is None:
        return (weights.q,)
    if weights.v is weights.k:
        return weights.q, weights.k
    return weights.q, weights.k, weights.v


def _split_gates(
    kernels: Kernels,
    gate: OutputGate,
    q: FloatArray,
    normed: FloatArray,
    cache: LayerCache,
    prompt: bool,
) -> tuple[FloatArray, FloatArray]:
    """Return q without the gate's rows, and the gate [T * heads, 1 or value_dim]."""
    head_dim = cache.shape.head_dim
    if gate.weight is None:
        pairs = q.reshape(-1, 2, head_dim)
        own = np.ascontiguousarray(pairs[:, 0]).reshape(len(q), -1)
        return own, np.ascontiguousarray(pairs[:, 1])
    gates = kernels.matmul(gate.weight, normed, prompt=prompt)
    num_heads = q.shape[1] // head_dim
    return q, gates.reshape(len(q) * num_heads, -1)


def _heads(
    dense: DenseKernels,
    weights: AttentionWeights,
    products: tuple[FloatArray, ...],
    shape: CacheShape,
) -> list[FloatArray]:
    """Return the products of q and k [T, heads, head_dim] and v [T, heads, value_dim].

    With biases, limits, and the norm over all heads, where there are any. Fewer products where values are the keys, or all are
    another layer's.
    """
    found = list(products)
    if weights.biases is not None:
        for product, bias in zip(found, weights.biases, strict=True):
            product += bias
    if weights.clip:
        for product in found:
            np.clip(product, -weights.clip, weights.clip, out=product)
    if weights.wide_norm is not None:
        epsilon = weights.head_norm.epsilon
        for index, gain in enumerate(weights.wide_norm):
            found[index] = dense.rms_norm(found[index], gain, epsilon)
    dims = shape.head_dim, shape.head_dim, shape.value_dim
    return [
        product.reshape(len(product), -1, dim) for product, dim in zip(found, dims, strict=False)
    ]


def route(
    kernels: Kernels,
    parts: LayerParts,
    x: FloatArray,
    *,
    prompt: bool,
    embedded: FloatArray | None = None,
    token_ids: IntArray | None = None,
) -> Routed:
    """Return the routing of the residual stream x [T, D], or of several, and x with the shared expert added.

    The shared expert is added first: the order of additions is the same wherever routed experts are computed.
    embedded: float32 [T, width] of a layer with embeddings of tokens. token_ids: int32 [T], for experts that are looked up.
    x where attention hands on more: see `begin_attention`.
    """
    if parts.norm is None:
        return Routed(x, x, _no_routing(len(x)))
    if parts.streams is not None:
        return _route_streams(kernels, parts, parts.streams.feed_forward, x, prompt, token_ids)
    if parts.end is not None:
        routed = _route_branches(kernels, parts, parts.end, x, prompt)
        return routed if embedded is None else _embedded(kernels, parts, routed, embedded, prompt)
    dense, handed = kernels.dense, None
    if parts.handed_on:
        x, handed = map(np.ascontiguousarray, np.split(x, 2, axis=1))
    if handed is not None and parts.handed_on is HandedOn.NORMED:
        normed = handed
    else:
        normed = norm_rows(dense, x, parts.norm, parts.epsilon, parts.centering)
    residual = x
    if parts.shared is not None:
        residual = _add_shared(kernels, parts.shared, normed, x, prompt)
    if parts.routed is None:
        return Routed(residual, normed, _no_routing(len(x)))
    logits = kernels.matmul(parts.routed.router, normed if handed is None else handed)
    normed, routing = _weighed(
        parts.routed, normed, Routing(*dense.route(logits, parts.routed.rule))
    )
    around = parts.routed.around
    if around is None:
        return Routed(residual, normed, routing)
    narrow = kernels.matmul(around.down, normed, prompt=prompt)
    finish = partial(kernels.matmul, around.up, add=residual, prompt=prompt)
    return Routed(np.zeros_like(narrow), narrow, routing, LayerEnding(residual, finish))


def _route_streams(
    kernels: Kernels,
    parts: LayerParts,
    mixer: AnyMixer,
    x: FloatArray,
    prompt: bool,
    token_ids: IntArray | None,
) -> Routed:
    """Return the routing of several residual streams x [T, streams * D], which take shares of the experts' sum."""
    taken, rest, shares = narrow(kernels, mixer, x, prompt=prompt)
    added = np.zeros_like(taken)
    if parts.shared is not None:
        added = _add_shared(kernels, parts.shared, taken, added, prompt)
    if parts.routed is None:
        return Routed(widen(rest, added, shares), taken, _no_routing(len(x)))
    logits = kernels.matmul(parts.routed.router, taken)
    table, given = parts.routed.by_token, None
    if table is not None:
        assert token_ids is not None, "experts are looked up by tokens"
        given = table[token_ids]
    routing = Routing(*kernels.dense.route(logits, parts.routed.rule, given))
    return Routed(added, taken, routing, LayerEnding(x, partial(widen, rest, shares=shares)))


def _route_branches(
    kernels: Kernels, parts: LayerParts, end: PostNorm, x: FloatArray, prompt: bool
) -> Routed:
    """Return the routing of a layer that norms what its experts give; without routed ones x is the layer's output.

    The experts are added to zeros, so that every backend gives their sum.
    """
    dense, routed = kernels.dense, parts.routed
    assert parts.norm is not None
    normed = norm_rows(dense, x, parts.norm, parts.epsilon, parts.centering)
    shared = np.zeros_like(x)
    if parts.shared is not None:
        shared = _add_shared(kernels, parts.shared, normed, shared, prompt)
    if routed is None:
        out = dense.add_normed(x, shared, None, end)
        return Routed(out, normed, _no_routing(len(x)))
    router_input = experts_input = normed
    if routed.own is not None:
        router_input = dense.rms_norm(x, routed.own.router, parts.epsilon)
        experts_input = dense.rms_norm(x, routed.own.experts, parts.epsilon)
    routing = Routing(*dense.route(kernels.matmul(routed.router, router_input), routed.rule))
    experts_input, routing = _weighed(routed, experts_input, routing)
    ending = LayerEnding(x, partial(dense.add_normed, x, shared, norm=end))
    return Routed(np.zeros_like(x), experts_input, routing, ending)


def _weighed(routed: MoeWeights, x: FloatArray, routing: Routing) -> tuple[FloatArray, Routing]:
    """Return the experts' input [T, D], and the routing, with the weights in the one that the model has them in."""
    if not routed.weighs_input:
        return x, routing
    ids, weights = routing.expert_ids, routing.weights
    return x * weights, Routing(ids, np.ones_like(weights))


def _embedded(
    kernels: Kernels, parts: LayerParts, routed: Routed, embedded: FloatArray, prompt: bool
) -> Routed:
    """Return what a layer gives, with what it adds of its embeddings of the tokens at its end."""
    assert parts.embedding is not None, "embeddings that no layer takes"
    add = partial(add_embedding, kernels, parts.embedding, embedded=embedded, prompt=prompt)
    ending = routed.ending
    if ending is None:
        return routed._replace(residual=add(routed.residual))
    finish = ending.finish
    return routed._replace(ending=replace(ending, finish=lambda sums: add(finish(sums))))


def add_embedding(
    kernels: Kernels,
    part: LayerEmbedding,
    x: FloatArray,
    *,
    embedded: FloatArray,
    prompt: bool,
) -> FloatArray:
    """Return x [T, D] with what a layer adds of its embeddings of the tokens [T, width]; see `LayerEmbedding`."""
    gates = kernels.matmul(part.gate, x, prompt=prompt)
    gated = kernels.dense.gate(embedded, gates, Activation.GELU)
    added = kernels.matmul(part.up, gated, prompt=prompt)
    return kernels.dense.add_normed(x, added, None, part.norm)


def _no_routing(num_tokens: int) -> Routing:
    nobody = np.empty((num_tokens, 0), np.int32)
    return Routing(nobody, nobody.astype(np.float32))


def _add_shared(
    kernels: Kernels, shared: SharedExpert, normed: FloatArray, x: FloatArray, prompt: bool
) -> FloatArray:
    num_tokens = len(x)
    scale = np.ones((num_tokens, 1), np.float32)
    if shared.gate is not None:
        logits = kernels.matmul(shared.gate, normed)
        scale = kernels.dense.gate(scale, logits, Activation.SIGMOID)
    rows = np.arange(num_tokens, dtype=np.int32)
    counts = np.array([num_tokens], np.int32)
    work = ExpertWork(
        shared.stack, np.zeros(1, np.int32), counts, normed, rows, scale.reshape(num_tokens)
    )
    return kernels.expert_sum(work, rows[:, None], x, prompt=prompt)


def add_experts(
    kernels: Kernels,
    parts: LayerParts,
    routed: Routed,
    *,
    prompt: bool,
    may_be_missing: bool = False,
) -> FloatArray:
    """Return float32 [T, D] behind a layer, all of whose chosen experts are computed here at once.

    may_be_missing: as in `ExpertWork`.
    """
    moe = parts.routed
    if moe is None:
        return routed.residual
    ids = routed.routing.expert_ids
    order = np.argsort(ids, axis=None, kind="stable").astype(np.int32)
    experts, counts = np.unique(ids, return_counts=True)
    work = ExpertWork(
        moe.stack,
        experts.astype(np.int32),
        counts.astype(np.int32),
        routed.x,
        order // np.int32(ids.shape[1]),
        routed.routing.weights.reshape(-1)[order],
        may_be_missing=may_be_missing,
    )
    pair_of = np.empty(ids.size, np.int32)
    pair_of[order] = np.arange(ids.size, dtype=np.int32)
    x = kernels.expert_sum(work, pair_of.reshape(ids.shape), routed.residual, prompt=prompt)
    return x if routed.ending is None else routed.ending.finish(x)


def compute_layer(
    kernels: Kernels,
    model: Model,
    layer: LayerIndex,
    chunk: Chunk,
    x: FloatArray,
    cache: SequenceCache,
) -> FloatArray:
    """Return x [T, D] after a layer: in one job where the model has such, else part by part, with the same bits."""
    if model.has_whole_layers:
        return model.layer(layer, chunk, x, cache)[0]
    return layer_by_parts(kernels, model, layer, chunk, x, cache)[0]


def layer_by_parts(
    kernels: Kernels,
    model: Model,
    layer: LayerIndex,
    chunk: Chunk,
    x: FloatArray,
    cache: SequenceCache,
    on_routed: OnRouted | None = None,
) -> tuple[FloatArray, Routing]:
    """Return what `Model.layer` does, by parts that are computed one after another."""
    attended, prompt = model.attend(layer, chunk, x, cache), chunk.is_prompt
    routed = model.route(layer, chunk, attended)
    may_be_missing, parts = on_routed is not None, model.non_expert.layers[layer]
    if on_routed is not None and parts.routed is not None:
        stream = routed.residual if routed.ending is None else routed.ending.stream
        on_routed(routed.routing.expert_ids, stream)
    out = add_experts(kernels, parts, routed, prompt=prompt, may_be_missing=may_be_missing)
    return out, routed.routing
