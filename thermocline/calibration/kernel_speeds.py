"""Measures how fast this machine's kernels compute the parts of one opened model.

Blocks for some seconds and takes the computing threads for itself: never on an event loop. Every part is timed
in turn with all others, several rounds, and its median counts, so that a passing load does not fall on one part
alone; layers and experts change from round to round, so that none is found in a cache by accident. Their bytes
must be in memory. Knows no disk and no engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from thermocline.costmodel.cost_model import non_expert_kind
from thermocline.costmodel.machine_speeds import AttentionSpeeds, RowCosts
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.dense_contract import Attending
from thermocline.messages import LayerIndex, SegmentKind
from thermocline.models.layers import compute_layer
from thermocline.models.lone_sequence import lone_cache, lone_chunk, lone_segment
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from thermocline.kernels.cache_format import CacheType
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.weight import FloatArray
    from thermocline.messages import Chunk
    from thermocline.models.contract import Model
    from thermocline.models.sizes import LayerSizes, ModelSizes

# Rows whose costs are measured; costs between them are interpolated.
_ROWS: Final = (1, 4, 16, 64, 256)
_HEAD_ROWS: Final = (1, 4, 16)
_LAYERS_OF_A_KIND: Final = 2
# Pairs of token and expert in one measurement of many rows: work for all threads, done in tens of milliseconds.
_PAIRS: Final = 1024
_BLOCK_TOKENS: Final = 32
# Cached tokens that attention is timed with, and a prompt's queries: their pairs outweigh the call.
_CACHED_TOKENS: Final = 2048
_QUERIES: Final = 128
# Two or four of it are a small number in every type that a cache has.
_CACHE_BYTE: Final = 0x3C
# Of 10 TB/s, which no processor reads: what is left of a difference of two times may be less than nothing.
_LEAST_S_PER_BYTE: Final = 1e-13


_Name = TypeVar("_Name", str, tuple[str, str])


class _Key(NamedTuple):
    """What was timed: a part, of which layers, with how many rows."""

    part: str
    name: str
    rows: int


_Probe: TypeAlias = Callable[[int], Callable[[], object]]
"""From the number of a round to the call that is timed."""


@dataclass(frozen=True, slots=True)
class KernelSpeeds:
    """The part of `MachineSpeeds` that kernels decide."""

    experts: Mapping[str, RowCosts]
    trunk: Mapping[str, RowCosts]
    head: RowCosts
    attention: AttentionSpeeds


def timed_layers(sizes: ModelSizes) -> tuple[LayerIndex, ...]:
    """Return the layers that `measure_kernels` reads, besides the head: a few of each kind and layout."""
    alike = _grouped(map(LayerIndex, range(len(sizes.layers))), lambda n: _alike(sizes.layers[n]))
    return tuple(layer for group in alike.values() for layer in group[:_LAYERS_OF_A_KIND])


def measure_kernels(
    model: Model,
    kernels: Kernels,
    sizes: ModelSizes,
    cache_type: CacheType,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> KernelSpeeds:
    """Return the median speeds of so many rounds, after one that does not count. Blocks.

    kernels: what the model was opened with; they must compute whole layers. clock: seconds.
    """
    parts = _Parts(model, kernels, sizes, cache_type)
    probes = parts.probes()
    spent: dict[_Key, list[float]] = {key: [] for key in probes}
    for number in range(rounds + 1):
        for key, probe in probes.items():
            call = probe(number)
            start = clock()
            call()
            seconds = clock() - start
            if number:
                spent[key].append(seconds)
    return parts.speeds({key: statistics.median(times) for key, times in spent.items()})


class _Parts:
    """What is timed of one model, and what its times say."""

    def __init__(
        self, model: Model, kernels: Kernels, sizes: ModelSizes, cache_type: CacheType
    ) -> None:
        self._model, self._kernels, self._sizes = model, kernels, sizes
        spec = model.spec
        num_blocks = ceil_div(_CACHED_TOKENS, _BLOCK_TOKENS)
        self._cache = lone_cache(spec, num_blocks, _BLOCK_TOKENS, cache_type)
        self._blocks = np.arange(num_blocks, dtype=np.int32)
        self._rng = np.random.default_rng(1)
        shape = (_CACHED_TOKENS, spec.stream_size)
        self._x = self._rng.standard_normal(shape).astype(np.float32)
        # Layers that are alike take turns.
        timed = timed_layers(sizes)
        self._by_kind = _grouped(timed, lambda n: non_expert_kind(sizes.layers[n]))
        self._by_layout = _grouped(timed, lambda n: sizes.layers[n].layout)
        self._by_both = _grouped(timed, lambda n: _alike(sizes.layers[n]))
        self._with_cache = [n for n in timed if sizes.layers[n].seen_per_token]
        for layer in self._with_cache:
            # Memory that was never written is one page of zeros, which any cache holds.
            kept = self._cache.kv.layer(layer)
            for array in kept.arrays:
                array[:] = _CACHE_BYTE

    def probes(self) -> dict[_Key, _Probe]:
        """Return all that is timed, in the order in which a round times it."""
        found: dict[_Key, _Probe] = {}
        for (kind, layout), layers in self._by_both.items():
            found[_Key("layer", kind + layout, 1)] = partial(self._whole_layer, layers)
        for kind, layers in self._by_kind.items():
            for rows in _ROWS[1:]:
                found[_Key("trunk", kind, rows)] = partial(self._trunk, layers, rows)
        for layout, layers in self._by_layout.items():
            for rows in _ROWS if layout else ():
                found[_Key("experts", layout, rows)] = partial(self._experts, layers, rows)
        for rows in _HEAD_ROWS:
            found[_Key("head", "", rows)] = partial(self._head, rows)
        for queries in (1, _QUERIES) if self._with_cache else ():
            found[_Key("attention", "", queries)] = partial(self._attention, queries)
        return found

    def speeds(self, seconds: Mapping[_Key, float]) -> KernelSpeeds:
        """Return what the median times of all keys say."""
        decode_s, prompt_s = (
            seconds.get(_Key("attention", "", queries), 0.0) / _num_pairs(queries, _CACHED_TOKENS)
            for queries in (1, _QUERIES)
        )
        attention = AttentionSpeeds(decode_s, prompt_s)
        experts = {
            layout: self._costs(
                self._sizes.layers[layers[0]].expert,
                {
                    rows: seconds[_Key("experts", layout, rows)] / self._num_timed(rows)
                    for rows in _ROWS
                },
            )
            for layout, layers in self._by_layout.items()
            if layout
        }
        head = {rows: seconds[_Key("head", "", rows)] for rows in _HEAD_ROWS}
        return KernelSpeeds(
            experts,
            {kind: self._trunk_costs(kind, seconds, experts, attention) for kind in self._by_kind},
            self._costs(self._sizes.output, head),
            attention,
        )

    def _trunk_costs(
        self,
        kind: str,
        seconds: Mapping[_Key, float],
        experts: Mapping[str, RowCosts],
        attention: AttentionSpeeds,
    ) -> RowCosts:
        """One row: what whole layers take beyond their experts. More: what attention and routing take."""
        first = []
        for (of_kind, layout), layers in self._by_both.items():
            if of_kind == kind:
                layer = self._sizes.layers[layers[0]]
                spent_s = seconds[_Key("layer", kind + layout, 1)] - attention.decode_pair_s
                if layout:
                    spent_s -= self._sizes.num_used * experts[layout].seconds(layer.expert, 1)
                first.append(spent_s)
        found = {1: statistics.mean(first)}
        has_cache = self._sizes.layers[self._by_kind[kind][0]].seen_per_token > 0
        for rows in _ROWS[1:]:
            pairs_s = attention.prompt_pair_s * _num_pairs(rows, rows) * has_cache
            found[rows] = seconds[_Key("trunk", kind, rows)] - pairs_s
        nbytes = statistics.mean(self._sizes.layers[n].non_expert for n in self._by_kind[kind])
        return self._costs(nbytes, found)

    def _costs(self, nbytes: float, seconds: Mapping[int, float]) -> RowCosts:
        # More rows never cost less.
        least, per_byte = _LEAST_S_PER_BYTE, []
        for spent_s in seconds.values():
            least = max(spent_s / nbytes, least)
            per_byte.append(least)
        return RowCosts(tuple(seconds), tuple(per_byte))

    def _whole_layer(self, layers: Sequence[LayerIndex], number: int) -> Callable[[], object]:
        layer, chunk = layers[number % len(layers)], self._chunk(1, SegmentKind.DECODE)
        x = self._some_x(1)
        self._choose_before(layer, chunk, x)
        return partial(compute_layer, self._kernels, self._model, layer, chunk, x, self._cache)

    def _trunk(self, layers: Sequence[LayerIndex], rows: int, number: int) -> Callable[[], object]:
        # Not the layer that was just read as a whole.
        layer = layers[(number + 1) % len(layers)]
        chunk = self._chunk(rows, SegmentKind.PROMPT)
        x = self._some_x(rows)
        self._choose_before(layer, chunk, x)

        def run() -> None:
            attended = self._model.attend(layer, chunk, x, self._cache)
            self._model.route(layer, chunk, attended)

        return run

    def _choose_before(self, layer: LayerIndex, chunk: Chunk, x: FloatArray) -> None:
        """Have the positions chosen that a layer reads which takes an earlier one's choice."""
        spec = self._model.spec
        of = None if spec.indexer is None or spec.latent is None else spec.indexer.layers
        if of is not None and layer not in (*of, *spec.keyless_layers, *spec.window_layers):
            choosing = max(n for n in of if n < layer)
            self._model.attend(LayerIndex(choosing), chunk, x, self._cache)

    def _experts(
        self, layers: Sequence[LayerIndex], rows: int, number: int
    ) -> Callable[[], object]:
        """Tokens choose experts in turn, so that each has as many rows."""
        stacked = self._model.expert_layers[layers[number % len(layers)]]
        assert stacked is not None, "a layout is one of routed experts"
        num_used, count = self._sizes.num_used, self._num_timed(rows)
        num_tokens = count * rows // num_used
        chosen = np.arange(num_tokens * num_used, dtype=np.int32) % np.int32(count)
        order = np.argsort(chosen, kind="stable").astype(np.int32)
        experts = np.sort(self._rng.choice(self._sizes.num_experts, count, replace=False))
        pair_of = np.empty(len(order), np.int32)
        pair_of[order] = np.arange(len(order), dtype=np.int32)
        # Experts may be narrower than the residual stream.
        x = np.ascontiguousarray(self._some_x(num_tokens)[:, : stacked.stack.hidden_size])
        work = ExpertWork(
            stacked.stack,
            experts.astype(np.int32),
            np.full(count, rows, np.int32),
            x,
            order // np.int32(num_used),
            np.ones(len(order), np.float32),
        )
        table = pair_of.reshape(num_tokens, num_used)
        return partial(self._kernels.expert_sum, work, table, x, prompt=rows > 1)

    def _num_timed(self, rows: int) -> int:
        """How many experts are timed at once: with one row those of a token, else some more."""
        num_used = self._sizes.num_used
        if rows == 1:
            return num_used
        count = min(self._sizes.num_experts, max(num_used, _PAIRS // rows))
        return count // num_used * num_used

    def _head(self, rows: int, number: int) -> Callable[[], object]:
        return partial(self._model.head, self._some_x(rows), prompt=False)

    def _attention(self, queries: int, number: int) -> Callable[[], object]:
        """The last of `_CACHED_TOKENS` tokens look back."""
        spec = self._model.spec
        layer = self._with_cache[number % len(self._with_cache)]
        cache, own = self._cache.kv.layer(layer), spec.at(layer)
        shape = (queries, own.num_heads, own.head_dim)
        q = self._rng.standard_normal(shape).astype(np.float32)
        positions = np.arange(_CACHED_TOKENS - queries, _CACHED_TOKENS, dtype=np.int32)
        runs = (lone_segment(queries, SegmentKind.PROMPT, self._blocks),)
        rule = Attending(spec.attention_scale)
        return partial(self._kernels.dense.attention, q, positions, runs, cache, rule)

    def _chunk(self, rows: int, kind: SegmentKind) -> Chunk:
        """Return a chunk of tokens that all models know, with their embeddings of each layer."""
        chunk, tokens = lone_chunk(rows, kind, self._blocks), np.zeros(rows, np.int32)
        own = self._model.embed_layers(tokens, self._some_x(rows), prompt=chunk.is_prompt)
        return replace(chunk, token_ids=tokens, embedded=own)

    def _some_x(self, rows: int) -> FloatArray:
        start = int(self._rng.integers(len(self._x) - rows + 1))
        return self._x[start : start + rows]


def _alike(layer: LayerSizes) -> tuple[str, str]:
    return non_expert_kind(layer), layer.layout


def _grouped(
    layers: Iterable[LayerIndex], name: Callable[[LayerIndex], _Name]
) -> dict[_Name, list[LayerIndex]]:
    """Return the layers of each name."""
    found: dict[_Name, list[LayerIndex]] = {}
    for layer in layers:
        found.setdefault(name(layer), []).append(layer)
    return found


def _num_pairs(queries: int, num_tokens: int) -> int:
    """Return how many (query, cached token) pairs the last `queries` of `num_tokens` tokens make."""
    before = num_tokens - queries
    return queries * before + queries * (queries + 1) // 2
