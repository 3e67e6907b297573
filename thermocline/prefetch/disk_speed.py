"""Measures how fast experts come from the disk that holds a model file. Blocks: never on an event loop.

Lets go of a part of the file's pages and reads them again as prefetch does. Where they stay in memory, since
another process uses them, there is nothing to measure. Knows no engine.
"""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.experts.catalog import ByteSpan
from thermocline.experts.machine_speeds import DiskSpeeds
from thermocline.kernels.native import load_native
from thermocline.messages import ExpertIndex, ExpertKey, LayerIndex
from thermocline.prefetch.advice import PageAdvisor
from thermocline.prefetch.readers import NUM_THREADS, PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.modelfile.reader import ModelFile

# Read at a time: a tenth of a second of a quick disk.
_SAMPLE_BYTES: Final = 128 << 20
_NUM_SAMPLES: Final = 3
# A piece counts as gone when at most this share of its sampled pages is still in memory.
_SAMPLED_PAGES: Final = 256
_MOST_RESIDENT: Final = 0.05
_SEED: Final = 3


def measure_disk(
    file: ModelFile,
    catalog: ExpertCatalog,
    num_used: int,
    threads: int,
    sample_bytes: int = _SAMPLE_BYTES,
) -> DiskSpeeds | None:
    """Return the median speeds of a few samples of each kind, taken in turn; None where pages do not go.

    num_used: experts that a token chooses of a layer; threads: how many compute.
    """
    layers = [n for n in map(LayerIndex, range(catalog.num_layers)) if catalog.expert_bytes(n)]
    samples = _Samples(file, catalog, layers, num_used, sample_bytes)
    core = load_native().Core("portable", threads)
    rates: tuple[list[float], list[float], list[float]] = [], [], []
    with ThreadPoolExecutor(NUM_THREADS, "disk speed") as pool:

        def fetch(pieces: Sequence[ByteSpan]) -> None:
            list(pool.map(samples.advisor.fetch, pieces))

        def touch(pieces: Sequence[ByteSpan]) -> None:
            for piece in pieces:
                core.read_all(file.mapping(piece.shard)[piece.start : piece.end])

        for _ in range(_NUM_SAMPLES if layers else 0):
            kinds = (
                (samples.in_order(), fetch),
                (samples.at_random(), fetch),
                (samples.in_order(), touch),
            )
            for found, (bursts, read) in zip(rates, kinds, strict=True):
                if not samples.release(bursts):
                    return None
                start = time.perf_counter()
                for burst in bursts:
                    read(burst)
                found.append(_num_bytes(bursts) / (time.perf_counter() - start))
    return DiskSpeeds(*map(statistics.median, rates)) if layers else None


class _Samples:
    """Draws what is read, and lets go of it before."""

    def __init__(
        self,
        file: ModelFile,
        catalog: ExpertCatalog,
        layers: Sequence[LayerIndex],
        num_used: int,
        sample_bytes: int,
    ) -> None:
        self.advisor = PageAdvisor(file)
        self._file, self._catalog, self._layers = file, catalog, layers
        self._num_used, self._sample_bytes = num_used, sample_bytes
        self._draw = random.Random(_SEED)

    def in_order(self) -> list[list[ByteSpan]]:
        """Return one burst: whole layers from one of them on."""
        start = self._draw.randrange(len(self._layers))
        layers = [*self._layers[start:], *self._layers[:start]]
        spans = (span for layer in layers for span in self._catalog.layer_spans(layer))
        return [_pieces(spans, self._sample_bytes)]

    def at_random(self) -> list[list[ByteSpan]]:
        """Return a burst for each of some layers: as many experts as a token chooses."""
        bursts: list[list[ByteSpan]] = []
        layers = self._draw.sample(self._layers, len(self._layers))
        for layer in layers:
            if _num_bytes(bursts) >= self._sample_bytes:
                break
            chosen = self._draw.sample(range(self._catalog.num_experts), self._num_used)
            keys = [ExpertKey(layer, ExpertIndex(expert)) for expert in chosen]
            spans = (span for key in keys for span in self._catalog.spans(key))
            bursts.append(_pieces(spans, self._sample_bytes))
        return bursts

    def release(self, bursts: Sequence[Sequence[ByteSpan]]) -> bool:
        """Let go of the pages; returns whether they went."""
        pieces = [piece for burst in bursts for piece in burst]
        try:
            for piece in pieces:
                # Only what this process has in view goes.
                self.advisor.fetch(piece)
                self.advisor.release(piece)
        except OSError:
            return False
        return _resident_share(self._file, pieces) <= _MOST_RESIDENT


def _num_bytes(bursts: Iterable[Iterable[ByteSpan]]) -> int:
    return sum(piece.end - piece.start for burst in bursts for piece in burst)


def _pieces(spans: Iterable[ByteSpan], sample_bytes: int) -> list[ByteSpan]:
    """Return the first spans in the pieces in which prefetch reads them."""
    found: list[ByteSpan] = []
    left = sample_bytes
    for span in spans:
        for start in range(span.start, span.end, PIECE_BYTES):
            if left <= 0:
                return found
            found.append(ByteSpan(span.shard, start, min(start + PIECE_BYTES, span.end)))
            left -= found[-1].end - start
    return found


def _resident_share(file: ModelFile, pieces: Sequence[ByteSpan]) -> float:
    """Return the share of pages in the middle of some pieces that are in memory; 1 where nobody tells."""
    some = pieces[:: max(1, len(pieces) // _SAMPLED_PAGES)]
    count = 0
    for shard in {piece.shard for piece in some}:
        middles = [(each.start + each.end) // 2 for each in some if each.shard == shard]
        found = load_native().resident_pages(file.mapping(shard), np.array(middles, np.int64))
        count += len(middles) if found < 0 else found
    return count / len(some)
