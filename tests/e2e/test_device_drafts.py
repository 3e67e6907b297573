"""Drafts where non-expert weights are on a device: several rows of an answer in one of its steps, which change no answer.

Torch's products round by their number of rows, so numbers are compared by the table's tolerance, and tokens exactly.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.e2e.test_draft_trees import TOKENS, WIDE, logits_by_way
from tests.e2e.test_speculation import (
    CASES,
    CONTEXT,
    STEM,
    TIMES,
    Answer,
    Request,
    answers_with,
    answers_without,
    known_answers,
    random_config,
    random_request,
)
from tests.support.arch_cases import ARCH_CASES
from tests.support.compare import assert_within
from tests.support.devices import DEVICES
from tests.support.eager_device import eager_device
from tests.support.scripted_drafters import HostileDrafter, ScriptedDrafter
from tests.support.toy_archs import ToyArch, write_toy_arch
from tests.support.toy_next_block import DRAFTING_TOYS, write_drafting_toy
from thermocline import (
    EngineConfig,
    PlacementConfig,
    PrefetchConfig,
    SamplingParams,
    SchedulerConfig,
    SpeculationConfig,
)
from thermocline.config import CpuConfig, MemoryConfig
from thermocline.engine import drafter_builder
from thermocline.models.device.non_expert import DeviceNonExpert
from thermocline.speculation import chains
from thermocline.speculation.contract import DrafterFacts
from thermocline.speculation.lookup import LookupDrafter

NAMES = ("laguna_default", "qwen35moe_default", "lfm2moe_default", "deepseek2_v3")
TREE_CASES = [case for name in NAMES for case in ARCH_CASES if str(case) == name]
NUM_REQUESTS = 12 if TIMES > 1 else 6
PLACES = {
    "cold": {},
    "whole": {"hot_fraction": 1.0},
    "hybrid": {"hot_fraction": 0.51},
}
"""Who computes experts: the CPU, the device, both."""


def in_places(cases):
    """Return each case with each place, in the ordinary suite each with one of them in turn."""
    return [
        (case, place)
        for number, case in enumerate(cases)
        for index, place in enumerate(PLACES)
        if TIMES > 1 or number % len(PLACES) == index
    ]


def placement(device: str, place: str) -> PlacementConfig:
    if place == "cold":
        return PlacementConfig(trunk_device=device, hot_device="none")
    hot = {"hot_device": device, "expert_cache": "static"}
    return PlacementConfig(trunk_device=device, **hot, **PLACES[place])


@pytest.fixture
def jobs(monkeypatch):
    """Count the rows of each decode step by the job that computes it."""
    found: Counter[tuple[str, bool]] = Counter()
    for name in ("attend_and_route", "all_layers", "shared_layers"):
        _count(monkeypatch, found, name)
    return found


def _count(monkeypatch, found, name):
    original = getattr(DeviceNonExpert, name)

    def counted(self, *args):
        chunk = args[1] if name == "attend_and_route" else args[0]
        if any(segment.num_drafted for segment in chunk.segments):
            found[name, chunk.has_branches] += 1
        return original(self, *args)

    monkeypatch.setattr(DeviceNonExpert, name, counted)


JOB_OF = {"cold": "shared_layers", "whole": "all_layers", "hybrid": "shared_layers"}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "place"), in_places([*TREE_CASES, WIDE]), ids=str)
def test_a_node_is_its_way_down_alone(tmp_path, monkeypatch, jobs, device, place, case):
    """Trees in every kind of layer: with windows, states, latent rows, and a cache of bytes."""
    toy = case if isinstance(case, ToyArch) else case.toy
    path = write_toy_arch(tmp_path / "m.gguf", toy)
    config = EngineConfig(
        placement=placement(device, place),
        memory=MemoryConfig(
            max_context_tokens=128,
            block_tokens=4,
            kv_type="q8_0" if case is WIDE else "f32",
            max_full_contexts=2,
        ),
        scheduler=SchedulerConfig(prefix_cache=False),
        prefetch=PrefetchConfig(mode="off"),
        cpu=CpuConfig(threads=1),
        speculation=SpeculationConfig(fixed_tokens=16),
    )
    with eager_device():
        tree, alone = asyncio.run(logits_by_way(path, monkeypatch, config))
    assert tree.keys() == alone.keys()
    assert len(tree) == 1 + len(TOKENS)
    for way, logits in alone.items():
        found, expected = (np.frombuffer(each, np.float32) for each in (tree[way], logits))
        # A byte of the cache may be rounded the other way.
        assert_within(
            found, expected, "non-expert/whole models" if case is WIDE else "non-expert/float32"
        )
    assert len({np.frombuffer(each, np.float32).tobytes() for each in tree.values()}) == len(tree)
    # Trees of more rows than a shared step takes go stage by stage.
    job = JOB_OF[place] if place == "whole" else "attend_and_route"
    assert jobs[job, True]


# Of log-probabilities. What one schedule computes as a prompt another may decode, and only the former is rounded on a
# GPU: 6e-3 measured.
LARGEST_DIFFERENCE = {"torch-cpu": 1e-3, "cuda": 2e-2}


def assert_same(found: Answer, expected: Answer, device: str, about) -> None:
    """All that a reader sees but how it comes in pieces, log-probabilities by the tolerance."""
    assert joined(found) == joined(expected), about
    mine, theirs = (
        [one.logprob for event in answer.events for one in event.logprobs]
        for answer in (found, expected)
    )
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=LARGEST_DIFFERENCE[device])


def joined(answer: Answer) -> tuple[object, ...]:
    """Return tokens, text, which tokens have log-probabilities, and the end with the experts of all tokens."""
    events = answer.events
    tokens = [token for event in events for token in event.token_ids]
    noted = [one.token_id for event in events for one in event.logprobs]
    last = events[-1]
    text = "".join(event.text for event in events)
    return tokens, text, noted, last.finish_reason, last.stop, last.routing


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "place"), in_places(CASES), ids=str)
def test_no_draft_changes_an_answer(tmp_path, monkeypatch, jobs, device, place, case):
    """Chains and trees, right, wrong and absurd, under random schedules: with batches, shared prefixes and preemption."""
    path = write_toy_arch(tmp_path / "m.gguf", case.toy)
    chance = random.Random(f"torch-cpu {place} {case}")  # the same requests on every device
    requests = [random_request(chance) for _ in range(NUM_REQUESTS)]
    there = placement(device, place)
    expected = asyncio.run(answers_without(path, requests, there))
    known = known_answers(requests, expected)
    total_accepted = first = 0
    while first < len(requests):
        batch = slice(first, first + chance.choice((1, 3, 4)))
        first = batch.stop
        facts = DrafterFacts("scripted", computes=chance.random() < 0.5)
        scripted = ScriptedDrafter(
            chance.choice((0.6, 0.9, 1.0)), known, facts, branches=chance.choice((0, 3, 9))
        )
        drafters = [scripted, HostileDrafter(first), LookupDrafter()]
        monkeypatch.setattr(drafter_builder, "open_drafters", lambda _, those=drafters: those)
        names = (("scripted",), ("scripted",), ("hostile",), ("lookup",), None)
        mine = [
            replace(
                one,
                options=replace(one.options, speculate=chance.choice(names)),
                rounds=chance.randrange(20),
            )
            for one in requests[batch]
        ]
        config = replace(random_config(chance), placement=there)
        if place != "whole":
            config = replace(config, prefetch=PrefetchConfig(mode="off"))
        with eager_device():
            answers = asyncio.run(answers_with(path, config, mine))
        for asked, answer, alone in zip(mine, answers, expected[batch], strict=True):
            assert_same(answer, alone, device, (asked, config))
            total_accepted += answer.num_accepted
    assert total_accepted, "no draft was ever right, which tests nothing"
    # A busy machine may compute shared steps stage by stage.
    assert sum(jobs.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("branches", [0, 11])
def test_steps_are_saved_by_each_job(tmp_path, monkeypatch, jobs, device, place, branches):
    """A drafter that is always right saves steps, its chains and small trees are in the job that other steps are in."""
    path = write_toy_arch(tmp_path / "m.gguf", CASES[2].toy)
    request = Request(tuple(STEM), SamplingParams(max_tokens=26, ignore_eos=True))
    there = placement(device, place)
    (alone,) = asyncio.run(answers_without(path, [request], there))
    drafter = ScriptedDrafter(1.0, known_answers([request], [alone]), branches=branches)
    monkeypatch.setattr(drafter_builder, "open_drafters", lambda _: [drafter])
    config = EngineConfig(
        placement=there,
        memory=MemoryConfig(max_context_tokens=CONTEXT, block_tokens=4),
        prefetch=PrefetchConfig(mode="off"),
        speculation=SpeculationConfig(fixed_tokens=5),
    )
    with eager_device():
        (answer,) = asyncio.run(answers_with(path, config, [request]))
    assert_same(answer, alone, device, config)
    assert answer.num_accepted >= (5 if branches else 10)
    # A busy machine may compute shared steps stage by stage.
    late = {"attend_and_route"} if device == "cuda" and place != "whole" else set()
    assert {name for name, _ in jobs} - late == {JOB_OF[place]}
    assert jobs[JOB_OF[place], bool(branches)] > 0


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "place"), in_places(DRAFTING_TOYS))
def test_a_file_s_own_block_drafts_on_the_cpu(tmp_path, monkeypatch, device, place, name):
    """It reads the last layer's rows, which are on the host: drafts are verified, and answers are the same."""
    monkeypatch.setattr(chains, "MIN_CONFIDENCE", 0.0)
    path = write_drafting_toy(tmp_path / "m.gguf", DRAFTING_TOYS[name])
    chance = random.Random(name)
    requests = [random_request(chance) for _ in range(6)]
    there = placement(device, place)
    expected = asyncio.run(answers_without(path, requests, there))
    mine = [
        replace(one, options=replace(one.options, speculate=("mtp",)), rounds=chance.randrange(20))
        for one in requests
    ]
    num_drafted = 0
    for first in range(0, len(mine), 3):
        config = replace(random_config(chance), placement=there)
        fixed = replace(config.speculation, fixed_tokens=config.speculation.fixed_tokens or 4)
        config = replace(config, speculation=fixed)
        batch = slice(first, first + 3)
        with eager_device():
            answers = asyncio.run(answers_with(path, config, mine[batch]))
        for answer, alone in zip(answers, expected[batch], strict=True):
            assert_same(answer, alone, device, config)
        num_drafted += sum(answer.num_drafted for answer in answers)
    assert num_drafted, "nothing was drafted, which tests nothing"
