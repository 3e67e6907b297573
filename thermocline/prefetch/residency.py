"""Samples whether the pages that are read ahead are in memory already, where reading ahead can not help.

Looks at a random sample of pages, which does not change where looking changes nothing. Knows no queue.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.native import load_native
from thermocline.messages import ExpertKey
from thermocline.prefetch.foreign_files import ForeignFiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thermocline.experts.catalog import ByteSpan, ExpertCatalog
    from thermocline.modelfile.reader import ModelFile

_SAMPLE_PAGES = 256

Place = tuple[int, int]
"""A shard, and the offset of a byte in it."""


class PageLook:
    """Finds which pages of a model's files are in memory. Waits for a disk only where a foreign file lacks a page."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self.foreign = ForeignFiles(file)
        """Files of which a page that is looked at and missing is read."""
        self._resident_pages = load_native().resident_pages
        self._pages_read_at_once = load_native().pages_read_at_once

    def count(self, shard: int, offsets: Sequence[int]) -> int:
        """Return how many of the pages of some bytes are in memory. Raises OSError when the kernel does not tell."""
        count = self._resident_pages
        if shard in self.foreign:
            self.foreign.descriptor(shard)  # raises where another file has taken its path
            count = self._pages_read_at_once
        found = count(self._file.mapping(shard), np.array(offsets, np.int64))
        if found < 0:
            raise OSError(-found, os.strerror(-found))
        return int(found)


class ResidencyProbe:
    """Looks at a few hundred pages of the experts, spread evenly over layers and experts.

    Of a model without experts it looks at the other weights.
    """

    def __init__(
        self, file: ModelFile, catalog: ExpertCatalog, non_expert: Sequence[ByteSpan] = ()
    ) -> None:
        self._catalog, self._non_expert = catalog, non_expert
        self._layers, self._num_experts = catalog.routed_layers, catalog.num_experts
        self._look = PageLook(file)
        self._draw = random.Random(_SAMPLE_PAGES).random
        self._num_pages = _SAMPLE_PAGES if self._layers or non_expert else 0
        places = [self._place() for _ in range(self._num_pages)]
        self._fixed = _by_shard(place for place in places if place[0] not in self._look.foreign)
        self._has_foreign = any(shard in self._look.foreign for shard, _ in places)

    def is_resident(self) -> bool:
        """Return whether every sampled page is in memory. Raises OSError when the kernel does not tell."""
        fixed = self._fixed.items()
        if any(self._look.count(shard, offsets) < len(offsets) for shard, offsets in fixed):
            return False
        # Looking at a foreign file reads what is missing: other pages each time, and none after the first that is.
        fresh = (self._place() for _ in range(self._num_pages * self._has_foreign))
        return all(
            self._look.count(shard, [offset])
            for shard, offset in fresh
            if shard in self._look.foreign
        )

    def _place(self) -> Place:
        spans = self._non_expert
        if self._layers:
            layer = self._layers[self._below(len(self._layers))]
            spans = self._catalog.spans(ExpertKey.of(layer, self._below(self._num_experts)))
        span = spans[self._below(len(spans))]
        return span.shard, span.start + self._below(span.end - span.start)

    def _below(self, end: int) -> int:
        # An engine opens with hundreds of these: `randrange` takes five times as long.
        return int(self._draw() * end)


def _by_shard(places: Iterable[Place]) -> dict[int, list[int]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    for shard, offset in places:
        found[shard].append(offset)
    return dict(found)
