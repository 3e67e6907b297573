"""EAGLE-3 drafters in an engine: drafts are what the files give alone, and answers stay the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.e2e.test_file_drafters import Foresight, generate, one_thread, with_drafter
from tests.e2e.test_speculation import Request, ask
from tests.support.compare import assert_within
from tests.support.dflash_runs import trunk_features
from tests.support.eagle3_runs import eagle_guesses
from tests.support.toy_archs import ToyArch, write_toy_arch
from tests.support.toy_eagle3 import EAGLES, ToyEagle, write_eagle
from thermocline import Engine, SamplingParams
from thermocline.config import CpuConfig, MemoryConfig
from thermocline.models.eagle3 import Eagle3Model
from thermocline.speculation import chains
from thermocline.speculation.eagle3 import Eagle3Drafter

STEM = [(7 * n) % 90 + 40 for n in range(30)]


@pytest.fixture(autouse=True)
def _every_guess_counts(monkeypatch):
    """Random models are never sure."""
    monkeypatch.setattr(chains, "MIN_CONFIDENCE", 0.0)


async def asked(path, config, prompts, params):
    """Return the tokens of all answers, which are asked for at once, and what was drafted of each."""
    async with Engine.open(path, config) as engine:
        found = await asyncio.gather(*(ask(engine, Request(tuple(p), params)) for p in prompts))
    return [[t for event in answer.events for t in event.token_ids] for answer in found], found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunk"), [("rows", 512), ("wide", 7), ("recurrent", 7)])
async def test_guesses_are_those_of_the_files_alone(tmp_path, monkeypatch, name, chunk):
    """Behind prompts, steps with right and wrong drafts, found prefixes and others' answers."""
    toy = EAGLES[name]
    path = write_toy_arch(tmp_path / "m.gguf", toy.target)
    drafter = write_eagle(tmp_path / "drafter.gguf", toy)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [STEM, [*STEM[:17], 5, 6, 7], [*STEM, 8]]
    config = one_thread("eagle3", drafter)
    scheduler = replace(config.scheduler, prefill_chunk_tokens=chunk, prefix_cache=True)
    memory = MemoryConfig(kv_type="f32", block_tokens=4)
    config = replace(config, scheduler=scheduler, memory=memory)
    off = with_drafter(config, "off", drafter)
    plain = [(await generate(path, off, prompt, params))[0] for prompt in prompts]
    answers = {tuple(p): [tuple(a)] for p, a in zip(prompts, plain, strict=True)}
    prompt_of = Foresight(monkeypatch, answers, name)._prompts
    seen, lengthen, logits_of = [], Eagle3Drafter._lengthen, Eagle3Model.logits

    def noting(self, drafts):
        known = [(draft.wish, (draft.wish.last_token, *draft.tokens)) for draft in drafts]
        seen.append((known, []))
        return lengthen(self, drafts)

    def noting_logits(self, states):
        seen[-1][1].append(logits_of(self, states))
        return seen[-1][1][-1]

    monkeypatch.setattr(Eagle3Drafter, "_lengthen", noting)
    monkeypatch.setattr(Eagle3Model, "logits", noting_logits)
    async with Engine.open(path, config) as engine:
        first = await ask(engine, Request(tuple(prompts[0]), params))
        rest = await asyncio.gather(*(ask(engine, Request(tuple(p), params)) for p in prompts[1:]))
    monkeypatch.setattr(Eagle3Model, "logits", logits_of)
    found = [first, *rest]
    assert [[t for event in answer.events for t in event.token_ids] for answer in found] == plain
    assert all(answer.num_drafted > answer.num_accepted > 5 for answer in found)
    features, num_compared = {}, 0
    for known, (logits,) in seen[::2]:
        for (wish, chain), row in zip(known, logits, strict=True):
            prompt = prompt_of[wish.request]
            if prompt not in features:
                whole = [*prompt, *answers[prompt][0]]
                features[prompt] = whole, trunk_features(path, whole, toy.layers_read)
            whole, given = features[prompt]
            count = wish.num_known - 1
            expected, _ = eagle_guesses(path, drafter, whole[:count], given[:count], chain)
            assert_within(row, expected[-1], "reference/float32")
            num_compared += 1
    assert num_compared > 20


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "auto"])
async def test_a_cache_of_bytes_changes_no_answer(tmp_path, isa):
    """With Q8_0 in both caches, several answers at once, with and without AVX-512."""
    toy = ToyEagle(ToyArch("laguna", kv_heads=4, head_dim=32, window=20, interval=2))
    path = write_toy_arch(tmp_path / "m.gguf", toy.target)
    drafter = write_eagle(tmp_path / "drafter.gguf", toy)
    config = one_thread("eagle3", drafter)
    config = replace(config, memory=MemoryConfig(kv_type="q8_0"), cpu=CpuConfig(threads=2, isa=isa))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[n, *range(40, 60 + n)] for n in range(1, 4)]
    plain, _ = await asked(path, with_drafter(config, "off", drafter), prompts, params)
    tokens, found = await asked(path, config, prompts, params)
    assert tokens == plain
    assert all(answer.num_drafted > 0 for answer in found)
