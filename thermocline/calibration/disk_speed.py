"""Measures how fast experts come from the disk that holds a model file. Blocks: never on an event loop.

Lets go of a part of the file's pages and reads them again as prefetch does. Where they stay in memory, since
another process uses them, there is nothing to measure. Knows no engine.
"""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

from thermocline.costmodel.machine_speeds import DiskSpeeds
from thermocline.messages import ExpertKey, LayerIndex
from thermocline.prefetch.advice import PageAdvisor
from thermocline.prefetch.governor_builder import advise_experts
from thermocline.prefetch.readers import NUM_THREADS, pieces_of
from thermocline.prefetch.residency import PageLook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from thermocline.experts.catalog import ByteSpan, ExpertCatalog
    from thermocline.modelfile.reader import ModelFile

# Read at a time: a tenth of a second of a quick disk.
_SAMPLE_BYTES: Final = 128 << 20
_NUM_SAMPLES: Final = 5
# Pieces count as released while at most this share of sampled pages is in memory.
_SAMPLED_PAGES: Final = 256
_MOST_RESIDENT: Final = 0.05
_SEED: Final = 3


def measure_disk(
    file: ModelFile,
    catalog: ExpertCatalog,
    num_used: int,
    sample_bytes: int = _SAMPLE_BYTES,
) -> DiskSpeeds | None:
    """Return the median speeds of a few samples of each kind, taken in turn; None where pages do not go.

    num_used: experts that a token chooses of a layer.
    """
    layers = catalog.routed_layers
    samples = _Samples(file, catalog, layers, num_used, sample_bytes)
    look = PageLook(file)
    in_order, at_random, gone = _Timed(), _Timed(), _Timed()
    with ThreadPoolExecutor(NUM_THREADS, "disk speed") as pool:

        def fetch(pieces: Sequence[ByteSpan]) -> None:
            list(pool.map(samples.advisor.fetch, pieces))

        def fetch_all(pieces: Sequence[ByteSpan]) -> None:
            in_huge_pages = partial(samples.advisor.fetch, in_huge_pages=True)
            list(pool.map(in_huge_pages, pieces))

        def release(pieces: Sequence[ByteSpan]) -> None:
            list(pool.map(samples.advisor.release, pieces))

        for _ in range(_NUM_SAMPLES if layers else 0):
            for bursts, read, timed in (
                (samples.in_order(), fetch_all, in_order),
                (samples.at_random(), fetch, at_random),
            ):
                try:
                    _Timed().add(fetch, bursts)  # only what this process has in view goes
                    gone.add(release, bursts)
                    has_left = _resident_share(look, bursts) <= _MOST_RESIDENT
                except OSError:
                    return None
                if not has_left:
                    return None
                timed.add(read, bursts)
    if not layers:
        return None
    return DiskSpeeds(
        in_order.rate,
        at_random.rate,
        gone.rate,
        in_order.cpu_s_per_byte,
        gone.cpu_s_per_byte,
    )


class _Timed:
    """Times of one kind of move, by its samples."""

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._cpu: list[float] = []

    def add(
        self,
        move: Callable[[Sequence[ByteSpan]], None],
        bursts: Sequence[Sequence[ByteSpan]],
    ) -> None:
        """Move one burst after the other."""
        start, start_cpu = time.perf_counter(), time.process_time()
        for burst in bursts:
            move(burst)
        nbytes = _num_bytes(bursts)
        self._rates.append(nbytes / (time.perf_counter() - start))
        self._cpu.append((time.process_time() - start_cpu) / nbytes)

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return statistics.median(self._rates)

    @property
    def cpu_s_per_byte(self) -> float:
        """Seconds of the processor, all threads together."""
        return statistics.median(self._cpu)


class _Samples:
    """Draws what is read."""

    def __init__(
        self,
        file: ModelFile,
        catalog: ExpertCatalog,
        layers: Sequence[LayerIndex],
        num_used: int,
        sample_bytes: int,
    ) -> None:
        self.advisor = PageAdvisor(file)
        advise_experts(self.advisor, catalog)
        self._catalog, self._layers = catalog, layers
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
            keys = [ExpertKey.of(layer, expert) for expert in chosen]
            spans = (span for key in keys for span in self._catalog.spans(key))
            bursts.append(_pieces(spans, self._sample_bytes))
        return bursts


def _num_bytes(bursts: Iterable[Iterable[ByteSpan]]) -> int:
    return sum(piece.end - piece.start for burst in bursts for piece in burst)


def _pieces(spans: Iterable[ByteSpan], sample_bytes: int) -> list[ByteSpan]:
    """Return the first spans in the pieces in which prefetch reads them."""
    found: list[ByteSpan] = []
    left = sample_bytes
    for span in spans:
        for piece in pieces_of(span):
            if left <= 0:
                return found
            found.append(piece)
            left -= piece.end - piece.start
    return found


def _resident_share(look: PageLook, bursts: Sequence[Sequence[ByteSpan]]) -> float:
    """Return the share of pages in the middle of some pieces that are in memory. Raises OSError where none is told."""
    pieces = [piece for burst in bursts for piece in burst]
    some = pieces[:: max(1, len(pieces) // _SAMPLED_PAGES)]
    count = 0
    for shard in {piece.shard for piece in some}:
        middles = [(each.start + each.end) // 2 for each in some if each.shard == shard]
        count += look.count(shard, middles)
    return count / len(some)
