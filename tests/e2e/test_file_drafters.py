"""Drafters from files of their own: answers stay the same to the bit, and drafts are what the file gives."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from tests.e2e.test_speculation import (
    TIMES,
    Request,
    answers_with,
    answers_without,
    ask,
    known_answers,
    random_config,
    random_request,
)
from tests.support.assistant_runs import assistant_guesses
from tests.support.compare import assert_within
from tests.support.dflash_runs import block_logits, trunk_features
from tests.support.same_events import are_same
from tests.support.toy_archs import ToyArch, toy_arch_metadata, write_toy_arch
from tests.support.toy_assistant import PAIRS, write_assistant
from tests.support.toy_dflash import TARGET, TOYS, ToyDrafter, masked_block, write_toy_drafter
from tests.support.toy_eagle3 import EAGLES, ToyEagle, write_eagle
from thermocline import Engine, EngineConfig, SamplingParams, SpeculationConfig
from thermocline.config import CpuConfig, MemoryConfig, SchedulerConfig
from thermocline.errors import ConfigError, RequestError, UnsupportedModelError
from thermocline.messages import RequestOptions
from thermocline.models.gemma4_assistant import AssistantModel
from thermocline.speculation import chains, dflash
from thermocline.speculation.assistant import AssistantDrafter
from thermocline.speculation.dflash import DFlashDrafter
from thermocline.speculation.eagle3 import Eagle3Drafter
from thermocline.speculation.next_token import NextTokenDrafter

NUM_REQUESTS = 6 * TIMES
SMALL = ToyArch("qwen3", layers=2, experts=0, seed=3)
TARGETS = {
    "recurrent": TARGET,
    "window": ToyArch("laguna", kv_heads=4, window=20, interval=2),
    "latent": ToyArch("deepseek2", head_dim=24, rotary=8, query_rank=24),
}
DRAFTER = ToyDrafter(layers_read=(0, 1, 2), window=12)
DRAFTED = (
    *((name, kind) for name in ("dflash", "ddtree", "model", "eagle3") for kind in TARGETS),
    *(("assistant", kind) for kind in PAIRS),
)
"""Drafters, and what they draft for."""


@pytest.fixture(autouse=True)
def _every_guess_counts(monkeypatch):
    """Random models are never sure."""
    monkeypatch.setattr(chains, "MIN_CONFIDENCE", 0.0)
    monkeypatch.setattr(dflash, "_MIN_CONFIDENCE", 0.0)


def write_drafter(folder, name, target):
    if name == "model":
        return write_toy_arch(folder / "small.gguf", SMALL)
    if name == "assistant":
        (pair,) = (pair for pair in PAIRS.values() if pair.target == target)
        return write_assistant(folder / "assistant.gguf", pair)
    if name == "eagle3":
        return write_eagle(folder / "eagle3.gguf", ToyEagle(target))
    return write_toy_drafter(folder / "drafter.gguf", DRAFTER, target)


def with_drafter(config: EngineConfig, name, path, fixed=None) -> EngineConfig:
    changed = replace(config.speculation, drafters=name, draft_model=str(path), fixed_tokens=fixed)
    return replace(config, speculation=changed)


class Foresight:
    """Lets drafters over random files guess known answers, half of the time: by `seed` and the place in the answer alone."""

    def __init__(self, monkeypatch, answers, seed: str) -> None:
        self._answers, self._seed = answers, seed
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._known: dict[int, list[int]] = {}
        for kind in (AssistantDrafter, DFlashDrafter, Eagle3Drafter, NextTokenDrafter):
            monkeypatch.setattr(kind, "begin", self._noting("begin", kind.begin))
            monkeypatch.setattr(kind, "observe", self._noting("observe", kind.observe))
        monkeypatch.setattr(DFlashDrafter, "guess", self._guess_block)
        for kind in (AssistantDrafter, Eagle3Drafter, NextTokenDrafter):
            monkeypatch.setattr(kind, "guess", self._guess_next)

    def _noting(self, name, original):
        def noted(drafter, *args):
            if name == "begin":
                self._prompts[args[0]], self._known[args[0]] = tuple(args[1]), []
            else:
                self._known[args[0].request] += args[0].tokens
            return original(drafter, *args)

        return noted

    def _following(self, request) -> tuple[int, ...]:
        known = self._known[request]
        for answer in self._answers.get(self._prompts[request], ()):
            if list(answer[: len(known)]) == known:
                return answer[len(known) :]
        return ()

    def _chance(self, request) -> random.Random:
        """Return what the guesses of the next tokens are drawn by: not by who guessed before, which time decides."""
        place = self._prompts[request], len(self._known[request])
        return random.Random(f"{self._seed} {place}")

    def _guess_block(self, wish, logits):
        logits, chance = logits.copy(), self._chance(wish.request)
        for row, token in zip(logits, self._following(wish.request), strict=False):
            row[token] = row.max() + chance.choice((2.0, 1.0, -0.5, -1.0))
        return logits

    def _guess_next(self, wish, index, logits):
        following = self._following(wish.request)
        token = int(logits.argmax())
        chance = self._chance(wish.request)
        draws = [chance.random() for _ in range(index + 1)]
        if index < len(following) and draws[index] < 0.7:
            token = following[index]
        return token, 0.8


def drawn_requests(chance: random.Random) -> list[Request]:
    """Return requests of any kind; of each three the first is long, so that there is something to guess."""
    requests = [random_request(chance) for _ in range(NUM_REQUESTS)]
    plain = SamplingParams(max_tokens=28, ignore_eos=True)
    return [
        replace(one, params=plain) if number % 3 == 0 else one
        for number, one in enumerate(requests)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), DRAFTED)
def test_no_draft_of_a_file_changes_an_answer(tmp_path, monkeypatch, kind, name):
    """Under random schedules, as one row a step answers."""
    target = PAIRS[kind].target if name == "assistant" else TARGETS[kind]
    path = write_toy_arch(tmp_path / "m.gguf", target)
    drafter = write_drafter(tmp_path, name, target)
    chance = random.Random(f"{name} {kind}")
    requests = drawn_requests(chance)
    expected = asyncio.run(answers_without(path, requests))
    Foresight(monkeypatch, known_answers(requests, expected), f"{name} {kind}")
    num_drafted = num_accepted = 0
    for first in range(0, len(requests), 3):
        config = random_config(chance)
        fixed = config.speculation.fixed_tokens or 6
        batch = slice(first, first + 3)
        mine = [replace(one, rounds=chance.randrange(20)) for one in requests[batch]]
        found = asyncio.run(answers_with(path, with_drafter(config, name, drafter, fixed), mine))
        for asked, answer, alone in zip(mine, found, expected[batch], strict=True):
            assert are_same(answer.events, alone.events), (asked, config)
        num_drafted += sum(answer.num_drafted for answer in found)
        num_accepted += sum(answer.num_accepted for answer in found)
    assert num_drafted > num_accepted > 0, "all were right, or none, which tests little"


def one_thread(name, path, fixed=4) -> EngineConfig:
    config = EngineConfig(cpu=CpuConfig(threads=1), scheduler=SchedulerConfig(prefix_cache=False))
    return with_drafter(config, name, path, fixed)


async def generate(path, config, prompt, params):
    async with Engine.open(path, config) as engine:
        events = [event async for event in engine.generate(prompt, params)]
    return [token for event in events for token in event.token_ids], events[-1].timings.drafts


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3", "qwen2", "llama"])
async def test_a_model_that_drafts_for_itself_is_always_right(tmp_path, arch):
    """It computes what the larger model computes, from the same tokens, at every position."""
    path = write_toy_arch(tmp_path / "m.gguf", ToyArch(arch, experts=0))
    params = SamplingParams(max_tokens=41, ignore_eos=True)
    prompt = [(7 * n) % 90 + 40 for n in range(30)]
    plain, _ = await generate(path, one_thread("off", path), prompt, params)
    tokens, drafts = await generate(path, one_thread("model", path), prompt, params)
    assert tokens == plain
    assert (drafts.num_drafted, drafts.num_accepted) == (32, 32)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, 512])
async def test_drafts_are_what_the_layers_gave(tmp_path, monkeypatch, chunk):
    """The block's logits behind a prompt, and behind steps with right and wrong drafts, are those of the file alone."""
    path = write_toy_arch(tmp_path / "m.gguf", TARGET)
    drafter = write_toy_drafter(tmp_path / "drafter.gguf", TOYS["window"])
    toy, seen = TOYS["window"], []
    original = DFlashDrafter._draft

    def noting(self, wish, logits):
        seen.append((wish, logits.copy()))
        return original(self, wish, logits)

    monkeypatch.setattr(DFlashDrafter, "_draft", noting)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompt = [(7 * n) % 90 + 40 for n in range(30)]
    for name in ("dflash", "ddtree"):
        seen.clear()
        config = one_thread(name, drafter)
        scheduler = replace(config.scheduler, prefill_chunk_tokens=chunk)
        memory = MemoryConfig(kv_type="f32", block_tokens=4)
        config = replace(config, scheduler=scheduler, memory=memory)
        plain, _ = await generate(path, with_drafter(config, "off", drafter), prompt, params)
        Foresight(monkeypatch, {tuple(prompt): [tuple(plain)]}, name)
        tokens, drafts = await generate(path, config, prompt, params)
        assert tokens == plain
        assert drafts.num_drafted > drafts.num_accepted > 5
        known = prompt + tokens
        for wish, logits in seen:
            features = trunk_features(path, known[: wish.num_known - 1], toy.layers_read)
            expected = block_logits(path, drafter, features, masked_block(toy, wish.last_token))
            assert_within(logits, expected[1:], "reference/float32")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunk"), [("experts", 512), ("odd", 7), ("readers", 7)])
async def test_an_assistant_guesses_from_what_the_model_keeps(tmp_path, monkeypatch, name, chunk):
    """Behind prompts, steps with right and wrong drafts, found prefixes and others' answers, as the files alone do."""
    path = write_toy_arch(tmp_path / "m.gguf", PAIRS[name].target)
    drafter = write_assistant(tmp_path / "drafter.gguf", PAIRS[name])
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    stem = [(7 * n) % 90 + 40 for n in range(30)]
    prompts = [stem, [*stem[:17], 5, 6, 7], [*stem, 8]]
    config = one_thread("assistant", drafter)
    scheduler = replace(config.scheduler, prefill_chunk_tokens=chunk, prefix_cache=True)
    memory = MemoryConfig(kv_type="f32", block_tokens=4)
    config = replace(config, scheduler=scheduler, memory=memory)
    plain = [
        (await generate(path, with_drafter(config, "off", drafter), prompt, params))[0]
        for prompt in prompts
    ]
    answers = {tuple(p): [tuple(a)] for p, a in zip(prompts, plain, strict=True)}
    prompt_of = Foresight(monkeypatch, answers, name)._prompts
    seen, lengthen, logits_of = [], AssistantDrafter._lengthen, AssistantModel.logits

    def noting(self, drafts):
        before = [(draft.wish, (draft.wish.last_token, *draft.tokens)) for draft in drafts]
        seen.append((before, []))
        return lengthen(self, drafts)

    def noting_logits(self, states):
        seen[-1][1].append(logits_of(self, states))
        return seen[-1][1][-1]

    monkeypatch.setattr(AssistantDrafter, "_lengthen", noting)
    monkeypatch.setattr(AssistantModel, "logits", noting_logits)
    async with Engine.open(path, config) as engine:
        found = await asyncio.gather(*(ask(engine, Request(tuple(p), params)) for p in prompts))
    monkeypatch.setattr(AssistantModel, "logits", logits_of)
    tokens = [[token for event in answer.events for token in event.token_ids] for answer in found]
    assert tokens == plain
    assert all(answer.num_drafted > answer.num_accepted > 5 for answer in found)
    num_compared = 0
    for drafts, (logits,) in seen[::2]:
        for (wish, chain), row in zip(drafts, logits, strict=True):
            prompt = prompt_of[wish.request]
            known = [*prompt, *answers[prompt][0]][: wish.num_known - 1]
            expected, _ = assistant_guesses(path, drafter, known, chain)
            assert_within(row, expected[-1], "reference/float32")
            num_compared += 1
    assert num_compared > 20


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "auto"])
async def test_an_assistant_reads_a_cache_of_bytes(tmp_path, isa):
    """Answers are the same with a cache of Q8_0, several at once, with and without AVX-512."""
    pair = PAIRS["experts"]
    pair = replace(pair, target=replace(pair.target, near_head_dim=32))
    path = write_toy_arch(tmp_path / "m.gguf", pair.target)
    drafter = write_assistant(tmp_path / "drafter.gguf", pair)
    config = one_thread("assistant", drafter)
    config = replace(config, memory=MemoryConfig(kv_type="q8_0"), cpu=CpuConfig(threads=2, isa=isa))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[n, *range(40, 60 + n)] for n in range(1, 4)]
    off = with_drafter(config, "off", drafter)
    plain = [(await generate(path, off, prompt, params))[0] for prompt in prompts]
    async with Engine.open(path, config) as engine:
        found = await asyncio.gather(*(ask(engine, Request(tuple(p), params)) for p in prompts))
    tokens = [[token for event in answer.events for token in event.token_ids] for answer in found]
    assert tokens == plain
    assert all(answer.num_drafted > 0 for answer in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash", "model"])
async def test_heads_that_fit_no_bytes_draft_in_halves(tmp_path, name):
    """The model's cache is Q8_0; the drafter's heads of 16 numbers are no multiple of its blocks."""
    target = ToyArch("qwen2moe", layers=3, head_dim=32)
    path = write_toy_arch(tmp_path / "m.gguf", target)
    toy = ToyDrafter(layers_read=(0, 1, 2), head_dim=16)
    drafter = write_toy_drafter(tmp_path / "drafter.gguf", toy, target)
    if name == "model":
        drafter = write_drafter(tmp_path, name, target)
    config = replace(one_thread(name, drafter), memory=MemoryConfig(kv_type="q8_0"))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain, _ = await generate(path, with_drafter(config, "off", drafter), [1, 2, 3], params)
    tokens, drafts = await generate(path, config, [1, 2, 3], params)
    assert tokens == plain
    assert drafts.num_drafted > 0


async def opened(path, config) -> None:
    async with Engine.open(path, config):
        pass


async def test_drafters_that_can_not_be_are_refused(tmp_path):
    """At open, with what to do: no file, a file of another kind, two names of one file."""
    path = write_toy_arch(tmp_path / "m.gguf", TARGET)
    drafter, small = (write_drafter(tmp_path, name, TARGET) for name in ("dflash", "model"))
    pair = write_assistant(tmp_path / "assistant.gguf", PAIRS["experts"])
    eagle = write_eagle(tmp_path / "eagle3.gguf", EAGLES["wide"])
    for name in ("dflash", "ddtree", "model", "assistant", "eagle3"):
        config = EngineConfig(speculation=SpeculationConfig(drafters=name))
        with pytest.raises(ConfigError, match=f"{name} drafts with a file .* --draft-model FILE"):
            await opened(path, config)
    for name, file, there in (
        ("model", drafter, "dflash or ddtree"),
        ("ddtree", small, "model"),
        ("dflash,model", drafter, "dflash or ddtree"),
        ("dflash", pair, "assistant"),
        ("assistant", small, "model"),
        ("eagle3", drafter, "dflash or ddtree"),
        ("model", eagle, "eagle3"),
    ):
        with pytest.raises(ConfigError, match=f"drafts as {there}"):
            await opened(path, one_thread(name, file))
    with pytest.raises(ConfigError, match="choose one of them"):
        await opened(path, one_thread("dflash,ddtree", drafter))
    for alone in (drafter, pair, eagle):
        with pytest.raises(UnsupportedModelError, match="give it as --draft-model"):
            await opened(alone, EngineConfig())
    with pytest.raises(UnsupportedModelError, match="drafts for gemma4, not for qwen35moe"):
        await opened(path, one_thread("auto", pair))
    small = write_toy_arch(tmp_path / "small.gguf", replace(SMALL, layers=3))
    with pytest.raises(UnsupportedModelError, match=r"what layers \[1, 2, 3\] get, of 3 in all"):
        await opened(small, one_thread("auto", eagle))


async def test_a_draft_model_with_other_tokens_is_refused(tmp_path):
    """The first one that differs is named. More of them at the end of one vocabulary are not."""
    path = write_toy_arch(tmp_path / "m.gguf", TARGET)
    tokens = list(toy_arch_metadata(SMALL)["tokenizer.ggml.tokens"])
    tokens[70], tokens[90] = tokens[90], tokens[70]
    changed = {"tokenizer.ggml.tokens": tokens}
    small = write_toy_arch(tmp_path / "small.gguf", SMALL, metadata=changed)
    with pytest.raises(UnsupportedModelError, match=r"2 of 264 tokens differ.*token 70 is"):
        await opened(path, one_thread("auto", small))
    with pytest.raises(UnsupportedModelError, match="a draft model is dense"):
        await opened(path, one_thread("model", path))


async def test_a_request_names_the_drafter_that_there_is(tmp_path):
    """The file drafts in one way in an engine; others are no choice of a request."""
    path = write_toy_arch(tmp_path / "m.gguf", TARGET)
    drafter = write_drafter(tmp_path, "dflash", TARGET)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    async with Engine.open(path, one_thread("auto", drafter)) as engine:
        options = RequestOptions(speculate=("ddtree",))
        events = [event async for event in engine.events([1, 2, 3], params, options)]
        assert events[-1].timings.drafts.num_drafted > 0
        options = RequestOptions(speculate=("dflash",))
        with pytest.raises(RequestError, match="choose of auto, off, lookup, ddtree"):
            async for _ in engine.events([1, 2, 3], params, options):
                pass
        choice = next(each for each in engine.choices() if each.name == "speculation")
        assert choice.value == "lookup, ddtree"
