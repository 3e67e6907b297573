"""A tree of drafted tokens in one step gives each node what its way down gives alone, to the bit, in every kind of layer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.arch_cases import ARCH_CASES
from tests.support.settled import settled
from tests.support.toy_archs import ToyArch, write_toy_arch
from thermocline import Engine, EngineConfig, SamplingParams, SchedulerConfig, SpeculationConfig
from thermocline.config import CpuConfig, MemoryConfig
from thermocline.engine import drafter_builder
from thermocline.speculation.contract import Draft, DrafterFacts
from thermocline.stages.head import HeadStage

# Two branches leave the root, one leaves a branch, and nodes are in no order but parents first.
PARENTS = (-1, -1, 0, 1, 2, 0, 3, 5, 5, 4, 9, 8)
TOKENS = (50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61)
PROMPT = [(7 * n + n * n) % 64 + 40 for n in range(21)]
NAMES = (
    *("olmoe_default", "laguna_default", "qwen35moe_default", "lfm2moe_default"),
    *("nemotron_h_moe_default", "deepseek2_v3", "gemma4_default", "gpt-oss_default"),
    *("kimi-linear_default", "glm-dsa_shared", "glm5-next_shared", "qwen4exp_two_choices"),
    *(
        "qwen4exp_odd",
        "deepseek4_default",
        "deepseek4_odd",
        "hy_v4_default",
        "minimax-m3_default",
        "jamba_default",
    ),
    *("dots3note_default", "dots3note_odd"),
)
FAR_PROMPT = [(7 * n + n * n) % 64 + 40 for n in range(123)]
"""Of which tokens make an entry of 128 in branches of their own."""
CASES = [case for name in NAMES for case in ARCH_CASES if str(case) == name]
WIDE = ToyArch("qwen2moe", head_dim=32)
"""Heads that fit a cache of bytes."""


@dataclass
class OneDraft:
    """Proposes one draft, for a request's first step."""

    parents: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    facts: DrafterFacts = field(default_factory=lambda: DrafterFacts("one"))

    def begin(self, request, prompt):
        self._waits = True

    def propose(self, wishes):
        if not self._waits or not self.tokens:
            return []
        self._waits = False
        (wish,) = wishes
        return [Draft(wish.request, wish.num_known, self.tokens, self.parents)]

    def observe(self, verified):
        pass

    def end(self, request):
        pass


def way_to(node: int) -> list[int]:
    way = [node]
    while PARENTS[way[-1]] >= 0:
        way.append(PARENTS[way[-1]])
    return way[::-1]


async def logits_by_way(path, monkeypatch, config, prompt=PROMPT) -> tuple[dict, dict]:
    """Return logits by the tokens of a way down behind a prompt: of a tree's step, and of steps of single ways."""
    drafter, seen = OneDraft(), []
    monkeypatch.setattr(drafter_builder, "open_drafters", lambda _: [drafter])
    original = HeadStage._results

    def noting(stage, hidden):
        found = original(stage, hidden)
        if not hidden.chunk.is_prompt:
            seen.append((hidden.chunk, found[0]))
        return found

    monkeypatch.setattr(HeadStage, "_results", noting)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    tree: dict[tuple[int, ...], bytes] = {}
    alone: dict[tuple[int, ...], bytes] = {}
    async with Engine.open(path, config) as engine:
        drafter.tokens, drafter.parents = TOKENS, PARENTS
        async for _ in engine.generate(prompt, params):
            pass
        chunk, logits = seen[0]
        assert chunk.has_branches
        assert chunk.segments[0].num_drafted == len(TOKENS)
        assert sorted(chunk.token_ids[1:].tolist()) == sorted(TOKENS)
        for row, token in enumerate(chunk.token_ids.tolist()):
            way = [TOKENS[n] for n in way_to(TOKENS.index(token))] if row else []
            tree[tuple(way)] = logits[row].tobytes()
            assert chunk.positions[row] == len(prompt) + len(way)
        leaves = [node for node in range(len(PARENTS)) if node not in PARENTS]
        for leaf in leaves:
            drafter.tokens = tuple(TOKENS[node] for node in way_to(leaf))
            drafter.parents = tuple(range(-1, len(drafter.tokens) - 1))
            seen.clear()
            async for _ in engine.generate(prompt, params):
                pass
            for row, each in enumerate(seen[0][1]):
                alone[drafter.tokens[:row]] = each.tobytes()
        await settled(engine)
    return tree, alone


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, WIDE], ids=str)
@pytest.mark.parametrize(("block_tokens", "kv_type"), [(1, "f32"), (4, "bf16"), (16, "f16")])
def test_a_node_is_its_way_down_alone(tmp_path, monkeypatch, case, block_tokens, kv_type):
    """With branches that begin in the middle of a block, and others that fill several."""
    toy = case if isinstance(case, ToyArch) else case.toy
    kv_type, prompt = "q8_0" if case is WIDE else kv_type, PROMPT
    if toy.arch == "deepseek4":  # whose blocks are of 16 tokens or more
        block_tokens, prompt = {1: 16, 4: 32, 16: 48}[block_tokens], FAR_PROMPT
    path = write_toy_arch(tmp_path / "m.gguf", toy)
    config = EngineConfig(
        memory=MemoryConfig(
            max_context_tokens=256,
            block_tokens=block_tokens,
            kv_type=kv_type,
            max_full_contexts=2,
        ),
        scheduler=SchedulerConfig(prefix_cache=False),
        cpu=CpuConfig(threads=1),
        speculation=SpeculationConfig(fixed_tokens=16),
    )
    tree, alone = asyncio.run(logits_by_way(path, monkeypatch, config, prompt))
    assert tree.keys() == alone.keys()
    assert len(tree) == 1 + len(TOKENS)
    for way, logits in alone.items():
        assert tree[way] == logits, way
    assert len({np.frombuffer(each, np.float32).tobytes() for each in tree.values()}) == len(tree)
