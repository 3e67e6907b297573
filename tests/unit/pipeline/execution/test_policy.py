"""The policy: which of the executions a chunk gets, for every combination of what may be true."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.support.chunks import make_chunk, make_decode
from thermocline.messages import CachePlaces
from thermocline.pipeline.execution.policy import (
    FusedLayer,
    FusedModel,
    FusedStep,
    Load,
    Overlapped,
    Sequential,
    YieldPer,
    choose,
)

PROMPT, STEP = make_chunk(0), make_decode(make_chunk(1))
FIELDS = tuple(Load.__dataclass_fields__)
LOADS = [Load(*values) for values in product((False, True), repeat=len(FIELDS))]


@pytest.mark.parametrize("chunk", [PROMPT, STEP], ids=["prompt", "step"])
def test_nothing_is_fused_away_that_somebody_needs(chunk):
    """No fused layer where others compute, and no long job beside answers."""
    for load in LOADS:
        way = choose(chunk, load)
        if isinstance(way, FusedModel):
            wanted = load.device_streams if way.streams else load.device_has_model
            assert load.device_takes_step if way.with_cpu else wanted
        if way == FusedModel(streams=True):
            assert chunk.is_prompt
            assert load.may_overlap
        if way == FusedModel(with_cpu=True):
            assert not chunk.is_prompt
            assert not load.hints_are_wanted
        if isinstance(way, FusedStep):
            assert load.steps_are_fusable
            assert not load.hints_are_wanted
            assert not chunk.is_prompt
        if isinstance(way, FusedLayer | FusedStep):
            assert load.layers_are_fusable
            assert not load.other_lanes_have_work
        if chunk.is_prompt and load.is_beside_answers:
            assert way in (Overlapped(), Sequential(YieldPer.STAGE)), load


def test_lanes_overlap_where_they_have_work_and_may():
    """Whatever is not fused overlaps exactly when other lanes have work and the comparison allows it."""
    for load in LOADS:
        way = choose(PROMPT, load)
        if isinstance(way, Overlapped | Sequential):
            overlaps = load.other_lanes_have_work and load.may_overlap
            assert isinstance(way, Overlapped) == overlaps, load


@pytest.mark.parametrize(
    ("load", "way"),
    [
        (Load(device_has_model=True, other_lanes_have_work=True), FusedModel()),
        (Load(layers_are_fusable=True), FusedLayer()),
        (Load(layers_are_fusable=True, hints_are_wanted=True), FusedLayer()),
        (Load(layers_are_fusable=True, other_lanes_have_work=True), Overlapped()),
        (Load(layers_are_fusable=True, is_beside_answers=True), Sequential(YieldPer.STAGE)),
        (Load(), Sequential(YieldPer.LAYER)),
        (Load(other_lanes_have_work=True, may_overlap=False), Sequential(YieldPer.STAGE)),
    ],
)
def test_each_way_has_its_case(load, way):
    """What a prompt gets in the situations that the policy's lines name."""
    assert choose(PROMPT, load) == way


def test_a_decode_step_is_fused_beside_answers_too():
    """Only prompts are cut for the sake of answers: a step is an answer's own."""
    assert choose(STEP, Load(layers_are_fusable=True, is_beside_answers=True)) == FusedLayer()


def test_all_layers_of_a_step_are_one_job_where_they_may_be():
    """Not a prompt's, which others may interrupt, and not where prefetch is told of each layer."""
    load = Load(layers_are_fusable=True, steps_are_fusable=True)
    assert choose(STEP, load) == FusedStep()
    assert choose(STEP, replace(load, is_beside_answers=True)) == FusedStep()
    assert choose(STEP, replace(load, hints_are_wanted=True)) == FusedLayer()
    assert choose(STEP, replace(load, other_lanes_have_work=True)) == Overlapped()
    assert choose(PROMPT, load) == FusedLayer()


def test_branches_are_computed_part_by_part_on_the_cpu():
    """What they share is copied between the parts of a layer, so no job there has a whole one; a device's jobs copy it."""
    branches = CachePlaces(STEP.kv_slots, STEP.segments, np.zeros((1, 2), np.int32))
    step = replace(STEP, branch_places=branches)
    assert step.has_branches
    for load in LOADS:
        way = choose(step, load)
        if not isinstance(way, FusedModel):
            assert isinstance(way, Sequential | Overlapped), load
        assert isinstance(way, FusedModel) == isinstance(choose(STEP, load), FusedModel), load


def test_prefetch_is_told_experts_from_within_a_layers_job():
    """Hints keep neither a step nor a prompt from being one job per layer, but a step from being one for all."""
    load = Load(layers_are_fusable=True, steps_are_fusable=True, hints_are_wanted=True)
    assert choose(STEP, load) == FusedLayer()
    assert choose(PROMPT, load) == FusedLayer()
