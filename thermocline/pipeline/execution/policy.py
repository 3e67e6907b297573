"""Decides how a chunk is executed. The one place that does: asked once per chunk, when it starts. Pure.

- FusedModel: one job for all layers, on a device. One launch beats any overlap. The CPU serves it the experts that it
  lacks, if any, or they are copied to it for a prompt alone.
- FusedStep: one native job for all layers of a decode step. No other lane works on it, and nobody has to be told anything
  between its layers.
- FusedLayer: one native job per layer. No other lane works on the chunk, and nothing happens between a layer's parts
  but a hint to prefetch; a prompt's first hint comes before its first layer.
- Overlapped: stage by stage, on several lanes at once. Other lanes have work for the chunk.
- Sequential: stage by stage, one after the other. Something happens between the stages, but nothing overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias, assert_never

if TYPE_CHECKING:
    from thermocline.messages import Chunk


class YieldPer(Enum):
    """How often a prompt lets others have its lane."""

    LAYER = "layer"
    STAGE = "stage"


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Stages begin as soon as their input is there, whatever other stages still do."""

    yield_per: YieldPer = YieldPer.STAGE


@dataclass(frozen=True, slots=True)
class Sequential:
    """Each stage ends before the next begins."""

    yield_per: YieldPer


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One job per layer."""


@dataclass(frozen=True, slots=True)
class FusedStep:
    """One job for all layers of a decode step, on the CPU."""


@dataclass(frozen=True, slots=True)
class FusedModel:
    """One job for all layers, on a device.

    with_cpu: experts that the device lacks are computed beside it; streams: they are copied to it.
    """

    with_cpu: bool = False
    streams: bool = False


Execution: TypeAlias = Overlapped | Sequential | FusedLayer | FusedStep | FusedModel


def why(execution: Execution) -> str:
    """Return the condition of the first row that holds, for the user."""
    match execution:
        case FusedModel(with_cpu=True):
            return "a device computes all layers of it, and the CPU the experts that it lacks"
        case FusedModel(streams=True):
            return "a device computes all of it, and the experts that it lacks are copied to it meanwhile"
        case FusedModel():
            return "one device holds every weight and every expert"
        case FusedStep():
            return "no other lane works on it, and every expert is in memory"
        case FusedLayer():
            return "no other lane works on it"
        case Overlapped():
            return "other lanes have work for it"
        case Sequential():
            return "nothing overlaps, but others wait for its lane, or a stage stands alone"
        case _:
            assert_never(execution)


@dataclass(frozen=True, slots=True)
class Load:
    """What is true when a chunk starts.

    device_has_model: one device holds every weight and every expert. device_streams: one device holds every other weight, and copying to it the experts that it lacks pays for a
    prompt of this size. device_takes_step: a device computes all layers of a
    decode step of this size, and the CPU the experts that it lacks. layers_are_fusable: the CPU's kernels compute a
    whole layer in one job, with every expert that is not elsewhere. steps_are_fusable: and all layers of a decode step. other_lanes_have_work: a device or workers compute
    some of a chunk of this size. hints_are_wanted: each layer's choice of experts is told to the prefetcher.
    is_beside_answers: others are waiting for tokens. may_overlap: False compares with lanes that work one at a time.
    """

    device_has_model: bool = False
    device_streams: bool = False
    device_takes_step: bool = False
    layers_are_fusable: bool = False
    steps_are_fusable: bool = False
    other_lanes_have_work: bool = False
    hints_are_wanted: bool = False
    is_beside_answers: bool = False
    may_overlap: bool = True


def choose(chunk: Chunk, load: Load) -> Execution:
    """Return how `chunk` is executed."""
    # A decode step waits for the job that a prompt is in, so beside answers that job is one stage at most.
    may_fuse = not (chunk.is_prompt and load.is_beside_answers)
    if load.device_has_model and may_fuse:
        return FusedModel()
    if load.device_streams and load.may_overlap and may_fuse and chunk.is_prompt:
        return FusedModel(streams=True)
    if (
        load.device_takes_step
        and load.may_overlap
        and not (chunk.is_prompt or load.hints_are_wanted)
    ):
        return FusedModel(with_cpu=True)
    # The CPU copies tokens that branches share between the parts of a layer.
    may_fuse = may_fuse and not chunk.has_branches
    overlaps = load.other_lanes_have_work
    if load.layers_are_fusable and may_fuse and not overlaps:
        is_step = not (chunk.is_prompt or load.hints_are_wanted)
        return FusedStep() if load.steps_are_fusable and is_step else FusedLayer()
    if overlaps and load.may_overlap:
        return Overlapped()
    return Sequential(YieldPer.LAYER if may_fuse and not overlaps else YieldPer.STAGE)
