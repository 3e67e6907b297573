"""Builds the prefetch governor of one model file with its cache model, predictor, readers and probe."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.experts.catalog import ByteSpan
from thermocline.messages import LayerIndex
from thermocline.models.sizes import lasting_bytes
from thermocline.prefetch.advice import PageAdvisor
from thermocline.prefetch.cache_model import CacheModel
from thermocline.prefetch.governor import PrefetchGovernor
from thermocline.prefetch.memory import page_cache_room_bytes
from thermocline.prefetch.predictor import Predictor
from thermocline.prefetch.readers import ReaderThreads, is_read_in_huge_pages
from thermocline.prefetch.residency import ResidencyProbe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.kernels.contract import Kernels
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.contract import Model
    from thermocline.traces.recorder import Recorder

_LAYER: Final = re.compile(r"blk\.(\d+)\.")

_MOST_SPARE_BYTES: Final = 256 << 20
_SPARE_PART: Final = 16


def spare_bytes(room_bytes: int) -> int:
    """Return how much of the memory for files reading ahead leaves free: for activations, the system and other programs."""
    return min(_MOST_SPARE_BYTES, room_bytes // _SPARE_PART)


def advise_experts(advisor: PageAdvisor, catalog: ExpertCatalog) -> None:
    """Tell the kernel how experts are read. Where it refuses, more is read than needed, or by small pages."""
    with suppress(OSError):
        for layer in catalog.routed_layers:
            advisor.stop_read_ahead(catalog.layer_spans(layer))
    with suppress(OSError):
        for layer in catalog.routed_layers:
            advisor.allow_huge_pages(catalog.layer_spans(layer))


def build_governor(
    file: ModelFile,
    model: Model,
    kernels: Kernels,
    catalog: ExpertCatalog,
    elsewhere: NDArray[np.bool_],
    recorder: Recorder,
    *,
    probes: bool,
) -> PrefetchGovernor:
    """Return a running governor; close it before the file.

    kernels: of one thread, the planner's own. elsewhere: bool [layers, experts], experts that are not computed from the
    file. probes: check whether experts are in memory already, and read nothing ahead while they are.
    """
    non_expert_bytes = lasting_bytes(file.tensors.values(), model.spec) - catalog.total_bytes

    def room_bytes() -> int:
        room = page_cache_room_bytes()
        return room - spare_bytes(room) - non_expert_bytes

    advisor = PageAdvisor(file)
    advise_experts(advisor, catalog)
    non_expert = _non_expert_spans(file, catalog)
    with suppress(OSError):
        advisor.allow_huge_pages(span for _, span in non_expert if is_read_in_huge_pages(span))
    expert_bytes = [catalog.expert_bytes(LayerIndex(n)) for n in range(catalog.num_layers)]
    return PrefetchGovernor(
        CacheModel(expert_bytes, catalog.num_experts, room_bytes()),
        Predictor(model.router_weights, kernels, catalog.num_layers, catalog.num_experts),
        ReaderThreads(catalog, advisor, recorder, non_expert=non_expert),
        recorder,
        cold=~elsewhere & (np.array(expert_bytes) > 0)[:, None],
        room_bytes=room_bytes,
        probe=ResidencyProbe(file, catalog, [span for _, span in non_expert]) if probes else None,
    )


def _non_expert_spans(file: ModelFile, catalog: ExpertCatalog) -> list[tuple[int, ByteSpan]]:
    """Return the spans of non-expert weights, each with its layer, in the order of reading."""
    experts = {span for layer in catalog.routed_layers for span in catalog.layer_spans(layer)}
    has_output = "output.weight" in file.tensors
    found = []
    for info in file.tensors.values():
        span = ByteSpan(info.shard, info.offset, info.offset + info.nbytes)
        # A row of it per token.
        is_table = info.name.startswith("per_layer_token_embd") or (
            info.name.startswith("token_embd") and has_output
        )
        match = _LAYER.match(info.name)
        layer = catalog.num_layers if match is None else int(match[1])
        is_extra = (
            match is not None and layer >= catalog.num_layers
        )  # blocks for speculative decoding
        if not (span in experts or is_table or is_extra):
            found.append((layer, span))
    return sorted(found, key=lambda each: each[0])
