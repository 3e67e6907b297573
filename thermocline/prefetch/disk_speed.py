"""Measures how fast experts come from the disk that holds a model file. Blocks: never on an event loop.

Lets go of a part of the file's pages and reads them again as prefetch does. Where they stay in memory, since
another process uses them, there is nothing to measure. Knows no engine.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
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
    file: ModelFile, catalog: ExpertCatalog, sample_bytes: int = _SAMPLE_BYTES
) -> DiskSpeeds | None:
    """Return the median speeds of a few samples of each kind, taken in turn; None where pages do not go."""
    draw = random.Random(_SEED)
    layers = [n for n in map(LayerIndex, range(catalog.num_layers)) if catalog.expert_bytes(n)]
    rates: tuple[list[float], list[float]] = [], []
    for _ in range(_NUM_SAMPLES if layers else 0):
        turn = draw.randrange(len(layers))
        in_order = [layers[(turn + n) % len(layers)] for n in range(len(layers))]
        keys = [ExpertKey(n, ExpertIndex(e)) for n in layers for e in range(catalog.num_experts)]
        draw.shuffle(keys)
        samples = (
            (span for layer in in_order for span in catalog.layer_spans(layer)),
            (span for key in keys for span in catalog.spans(key)),
        )
        for found, spans in zip(rates, samples, strict=True):
            rate = _read_rate(file, _pieces(spans, sample_bytes))
            if rate is None:
                return None
            found.append(rate)
    return DiskSpeeds(*map(statistics.median, rates)) if layers else None


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


def _read_rate(file: ModelFile, pieces: Sequence[ByteSpan]) -> float | None:
    """Return bytes per second with as many readers as prefetch has."""
    advisor = PageAdvisor(file)
    try:
        for piece in pieces:
            # Only what this process has in view goes.
            advisor.fetch(piece)
            advisor.release(piece)
    except OSError:
        return None
    if _resident_share(file, pieces) > _MOST_RESIDENT:
        return None
    waiting = iter(pieces)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                piece = next(waiting, None)
            if piece is None:
                return
            advisor.fetch(piece)

    threads = [threading.Thread(target=work, name="disk speed") for _ in range(NUM_THREADS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(piece.end - piece.start for piece in pieces) / (time.perf_counter() - start)


def _resident_share(file: ModelFile, pieces: Sequence[ByteSpan]) -> float:
    """Return the share of pages in the middle of some pieces that are in memory; 1 where nobody tells."""
    some = pieces[:: max(1, len(pieces) // _SAMPLED_PAGES)]
    count = 0
    for shard in {piece.shard for piece in some}:
        middles = [(each.start + each.end) // 2 for each in some if each.shard == shard]
        found = load_native().resident_pages(file.mapping(shard), np.array(middles, np.int64))
        count += len(middles) if found < 0 else found
    return count / len(some)
