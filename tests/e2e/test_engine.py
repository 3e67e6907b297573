"""The async API as a caller meets it: events, limits, cancellation, failures, and nothing left over."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.settled import accepted, settled, turns
from tests.support.toy_model import TURN_END, ToyShape, toy_weights, write_toy_model
from thermocline import (
    Engine,
    EngineConfig,
    MemoryConfig,
    PrefetchConfig,
    SamplingParams,
    SchedulerConfig,
    TraceConfig,
)
from thermocline.config import CpuConfig
from thermocline.errors import (
    BusyError,
    ConfigError,
    EngineClosedError,
    EngineError,
    ModelFileError,
    PromptTooLongError,
    RequestError,
    StageError,
)
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense import NativeDense
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.whole_step import NativeStep
from thermocline.messages import FinishReason, RequestOptions
from thermocline.pipeline import prompt_ticks
from thermocline.prefetch.residency import ResidencyProbe
from thermocline.traces.chrome_reader import read_chrome
from thermocline.traces.lanes import Lane

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture
def toy(tmp_path):
    """The path of a toy model with room for 512 tokens."""
    return write_toy_model(tmp_path / "toy.gguf")


async def collect(engine, prompt, params):
    return [event async for event in engine.generate(prompt, params)]


async def test_an_answer_streams_and_ends_once(toy):
    """Tokens come one by one, the last event alone has a reason, timings and counts."""
    async with Engine.open(toy) as engine:
        events = await collect(engine, "hello", SamplingParams(max_tokens=9, ignore_eos=True))
        await settled(engine)
    tokens = [token for event in events for token in event.token_ids]
    assert len(tokens) == 9
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    last = events[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.timings.num_prompt_tokens, last.timings.num_output_tokens) == (5, 9)
    assert last.timings.prompt_s > 0


async def test_text_is_the_decoded_tokens(toy):
    """The streamed pieces together are the tokens' bytes, broken characters replaced."""
    async with Engine.open(toy) as engine:
        events = await collect(engine, "hello", SamplingParams(max_tokens=40, ignore_eos=True))
        tokens = [token for event in events for token in event.token_ids]
        raw = b"".join(
            engine.tokenizer.token_bytes(t) for t in tokens if not engine.tokenizer.is_control(t)
        )
    assert "".join(event.text for event in events) == raw.decode("utf-8", "replace")


async def test_two_requests_share_the_engine(toy):
    """Concurrent requests both finish, each with the tokens that it gets alone."""
    prompts = ["first prompt", "the second one", "a third"]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    async with Engine.open(toy) as engine:
        alone = [await collect(engine, prompt, params) for prompt in prompts]
        together = await asyncio.gather(*(collect(engine, prompt, params) for prompt in prompts))
        await settled(engine)

    def tokens(events):
        return [token for event in events for token in event.token_ids]

    assert [tokens(events) for events in together] == [tokens(events) for events in alone]


@pytest.mark.parametrize("prefetch", ["off", "on"])
async def test_a_step_of_answers_is_one_native_job_or_one_per_layer(toy, monkeypatch, prefetch):
    """Where nothing is hot, no decode step is torn into its stages; what is read ahead is told from within a layer's job."""
    num_tokens: list[int] = []
    num_steps = 0
    real, real_step = NativeKernels.whole_layer, NativeStep.__call__

    def counting(self, parts, given, on_routed=None):
        num_tokens.append(len(given.x))
        assert (on_routed is not None) == (prefetch == "on")
        return real(self, parts, given, on_routed)

    def counting_steps(self, given):
        nonlocal num_steps
        num_steps += 1
        return real_step(self, given)

    monkeypatch.setattr(NativeKernels, "whole_layer", counting)
    monkeypatch.setattr(NativeStep, "__call__", counting_steps)
    config = EngineConfig(prefetch=PrefetchConfig(mode=prefetch))
    async with Engine.open(toy, config) as engine:
        await collect(engine, "hello", SamplingParams(max_tokens=9, ignore_eos=True))
        governor = engine._parts.experts.governor
        if governor is not None:
            governor.wait_idle()  # it works beside the answer, and maybe behind it
        statistics = engine.statistics().prefetch
    num_layers, num_used = 2, 2
    # The first token comes with the prompt.
    assert (num_tokens.count(1), num_steps) == ((8 * num_layers, 0) if prefetch == "on" else (0, 8))
    if prefetch == "on":
        # A prompt's first hint comes before its layers.
        assert statistics.total_hints == 1 + 9 * num_layers
        selected = statistics.total_hits + statistics.total_late + statistics.total_misses
        assert selected >= 9 * num_layers * num_used


async def test_a_prompt_after_a_pause_is_one_native_job_per_layer(toy, monkeypatch):
    """All is in memory, and was so before the pause: no chunk of it is torn into its stages to give hints."""
    passed_s, num_tokens = [0.0], []
    real = NativeKernels.whole_layer

    def counting(self, parts, given, on_routed=None):
        num_tokens.append(len(given.x))
        return real(self, parts, given, on_routed)

    monkeypatch.setattr(NativeKernels, "whole_layer", counting)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0])
    monkeypatch.setattr("thermocline.prefetch.governor.time", clock)
    monkeypatch.setattr("thermocline.prefetch.governor._LOOK_EVERY_S", 60.0)
    config = EngineConfig(scheduler=SchedulerConfig(prefill_chunk_tokens=8))
    async with Engine.open(toy, config) as engine:
        toy.read_bytes()
        await collect(engine, [5] * 8, SamplingParams(max_tokens=1))
        engine._parts.experts.governor.wait_idle()
        num_tokens.clear()
        passed_s[0] += 3600.0
        await collect(engine, [6] * 24, SamplingParams(max_tokens=1))
    assert num_tokens == [8] * 3 * 2  # chunks, layers


async def test_seeded_sampling_repeats(toy):
    """One seed, one answer; another seed, another."""
    async with Engine.open(toy) as engine:

        async def sample(seed):
            params = SamplingParams(max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True)
            return [t for e in await collect(engine, "hello", params) for t in e.token_ids]

        assert await sample(1) == await sample(1) != await sample(2)


async def test_stop_strings_and_stop_tokens_end_the_answer(toy):
    """What comes before a stop string is sent, the string itself is not; a stop token has no text."""
    async with Engine.open(toy) as engine:
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        free = await collect(engine, "hello", params)
        text = "".join(event.text for event in free)
        tokens = [token for event in free for token in event.token_ids]
        stop = text[8:10]
        params = SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,))
        stopped = await collect(engine, "hello", params)
        assert "".join(event.text for event in stopped) == text[: text.index(stop)]
        assert stopped[-1].finish_reason is FinishReason.STOP
        end = next(t for t in tokens if tokens.index(t) >= 3)
        params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(end,))
        ended = await collect(engine, "hello", params)
        assert [t for e in ended for t in e.token_ids] == tokens[: tokens.index(end) + 1]
        assert ended[-1].finish_reason is FinishReason.STOP


async def test_the_model_s_end_token_stops_unless_ignored(toy):
    """A bias that forces the end token ends the answer at once with reason stop."""
    async with Engine.open(toy) as engine:
        end = engine.tokenizer.token_id(TURN_END)
        events = await collect(
            engine, "hello", SamplingParams(max_tokens=9, logit_bias={end: 100.0})
        )
    assert [event.token_ids for event in events] == [(end,)]
    assert events[0].finish_reason is FinishReason.STOP
    assert events[0].text == ""


async def test_logprobs_are_the_model_s(toy):
    """The chosen token's log-probability is the log-softmax of the scored logits."""
    async with Engine.open(toy) as engine:
        params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2)
        events = await collect(engine, [1, 2, 3], params)
        tokens = [t for e in events for t in e.token_ids]
        logits = np.concatenate([p.logits async for p in engine.score([1, 2, 3, *tokens])])
    for index, event in enumerate(events):
        row = logits[2 + index].astype(np.float64)
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        (entry,) = event.logprobs
        assert entry.logprob == pytest.approx(expected[tokens[index]], abs=1e-5)
        assert [top.token_id for top in event.top_logprobs[0]] == np.argsort(-expected)[:2].tolist()


async def test_prompt_progress_is_reported_per_chunk(toy):
    """A prompt of 10 in chunks of 4 reports 4, 8, 10 or a later state, never an earlier one."""
    seen = []
    config = EngineConfig(scheduler=SchedulerConfig(prefill_chunk_tokens=4))
    async with Engine.open(toy, config) as engine:
        async for _ in engine.generate(
            list(range(10)),
            SamplingParams(max_tokens=1),
            on_prompt_progress=lambda *p: seen.append(p),
        ):
            pass
    assert seen == sorted(seen)
    assert seen[-1] == (10, 10)


@pytest.mark.slow
async def test_prompt_progress_is_reported_within_a_chunk(toy, monkeypatch):
    """One chunk for all: the count is told while the last layer's experts are computed, and ends with what is true."""
    monkeypatch.setattr(prompt_ticks, "PERIOD_S", 0.001)
    seen, is_told, layers = [], threading.Event(), itertools.count(1)
    real = ReferenceKernels.expert_sum

    def held(self, *args, **kwargs):
        if next(layers) == num_layers:
            assert is_told.wait(20)
        return real(self, *args, **kwargs)

    def on_prompt_progress(*progress):
        seen.append(progress)
        is_told.set()

    async with Engine.open(toy, EngineConfig(kernels="reference")) as engine:
        num_layers = engine.spec.num_layers
        monkeypatch.setattr(ReferenceKernels, "expert_sum", held)
        async for _ in engine.generate(
            [7] * 200, SamplingParams(max_tokens=1), on_prompt_progress=on_prompt_progress
        ):
            pass
    assert sorted(set(seen)) == [(200 - 200 // num_layers, 200), (200, 200)]
    assert seen == sorted(seen)


async def test_scoring_gives_every_position_in_order(toy):
    """Chunks join without gap, and an answer of no tokens is a terminal event too."""
    config = EngineConfig(scheduler=SchedulerConfig(prefill_chunk_tokens=4))
    async with Engine.open(toy, config) as engine:
        parts = [part async for part in engine.score(range(11))]
        assert [part.start for part in parts] == [0, 4, 8]
        assert sum(len(part.logits) for part in parts) == 11
        events = await collect(engine, [1, 2], SamplingParams(max_tokens=0))
        assert [event.finish_reason for event in events] == [FinishReason.LENGTH]
        await settled(engine)


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([], "empty"),
        ([-1], "-1"),
        ([10**9], "outside"),
        ([True], "True"),
        (["a"], "'a'"),
        ("", "empty"),
    ],
)
async def test_bad_prompts_are_refused_with_the_field(toy, prompt, found):
    """The error names the prompt and what is wrong with it."""
    async with Engine.open(toy) as engine:
        with pytest.raises(RequestError, match=found) as caught:
            await collect(engine, prompt, LONG)
        assert caught.value.param == "prompt"
        await settled(engine)


async def test_a_prompt_may_be_a_numpy_array(toy):
    """Integers of any kind are tokens."""
    async with Engine.open(toy) as engine:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        from_list = await collect(engine, [1, 2, 3], params)
        from_array = await collect(engine, np.array([1, 2, 3], np.uint16), params)
    assert [e.token_ids for e in from_array] == [e.token_ids for e in from_list]


async def test_a_prompt_that_fills_the_context_is_refused(toy):
    """Prompt and answer share the context that was asked for."""
    config = EngineConfig(memory=MemoryConfig(max_context_tokens=16))
    async with Engine.open(toy, config) as engine:
        with pytest.raises(PromptTooLongError):
            await collect(engine, list(range(16)), LONG)
        events = await collect(engine, list(range(15)), LONG)
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert events[-1].timings.num_output_tokens == 1


@pytest.mark.parametrize(
    ("wanted", "room_bytes", "tokens"), [(0, 1 << 40, 1024), (0, 1000, 2048), (64, 1000, 64)]
)
async def test_chunks_of_a_model_that_does_not_fit_are_larger(
    toy, monkeypatch, wanted, room_bytes, tokens
):
    """Each chunk reads such a file once; a size that was asked for is kept."""
    monkeypatch.setattr(
        "thermocline.engine.cache_builder.page_cache_room_bytes", lambda: room_bytes
    )
    config = EngineConfig(
        scheduler=SchedulerConfig(prefill_chunk_tokens=wanted), cpu=CpuConfig(isa="portable")
    )
    async with Engine.open(toy, config) as engine:
        assert engine.chunk_tokens == tokens


async def test_one_request_too_many_is_busy_and_loses_nothing(toy):
    """The refused request leaves no trace; the accepted one ends as usual."""
    config = EngineConfig(scheduler=SchedulerConfig(max_requests=1))
    async with Engine.open(toy, config) as engine:
        stream = engine.generate("hello", SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(stream)
        with pytest.raises(BusyError):
            await collect(engine, "world", LONG)
        assert [event async for event in stream][-1].finish_reason is FinishReason.LENGTH
        await settled(engine)


async def test_leaving_the_stream_ends_the_request(toy):
    """A reader that breaks off frees its blocks; the engine goes on."""
    async with Engine.open(toy) as engine:
        stream = engine.generate("hello", LONG)
        await anext(stream)
        await stream.aclose()
        await settled(engine)
        assert await collect(engine, "hello", SamplingParams(max_tokens=2))


@pytest.mark.parametrize("num_events", [0, 1, 2, 5, 30])
async def test_cancelling_the_reader_ends_the_request_within_a_step(toy, num_events):
    """At whatever point the reader's task is cancelled, no block, chunk or request stays."""
    config = EngineConfig(scheduler=SchedulerConfig(prefill_chunk_tokens=3))
    async with Engine.open(toy, config) as engine:
        reached, seen = asyncio.Event(), itertools.count(1)

        async def read():
            async for _ in engine.events(list(range(40)), LONG, RequestOptions()):
                if next(seen) == num_events:
                    reached.set()

        task = asyncio.create_task(read())
        if num_events:
            await asyncio.wait_for(reached.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(engine)


class FailingKernels(NativeKernels):
    """Fails in the n-th expert call, then works again."""

    def __init__(self, fail_on: int) -> None:
        super().__init__()
        self._calls, self._fail_on = 0, fail_on

    def _count(self):
        self._calls += 1
        if self._calls == self._fail_on:
            raise MemoryError("no room, as told")

    def expert_sum(self, *args, **kwargs):
        self._count()
        return super().expert_sum(*args, **kwargs)

    def whole_layer(self, *args, **kwargs):
        self._count()
        return super().whole_layer(*args, **kwargs)

    def whole_step(self, layers):
        step = super().whole_step(layers)

        def compute(given):
            self._count()
            return step(given)

        return compute


@pytest.mark.parametrize("fail_on", [1, 3, 40])
async def test_a_failing_stage_fails_its_request_and_the_next_one_runs(toy, monkeypatch, fail_on):
    """The error names stage, layer and cause; the engine stays usable and clean."""
    monkeypatch.setattr(
        "thermocline.engine.cpu.NativeKernels", lambda *_, **__: FailingKernels(fail_on)
    )
    async with Engine.open(toy) as engine:
        with pytest.raises(StageError, match=r"(cold|layer).*MemoryError: no room") as caught:
            await collect(engine, "hello", LONG)
        assert caught.value.layer in (0, 1)
        assert await collect(engine, "hello", SamplingParams(max_tokens=3))
        await settled(engine)


async def test_broken_logits_fail_the_request_alone(toy, monkeypatch):
    """NaN from a damaged model is a typed error, not a token."""
    real = NativeKernels.matmul

    def poisoned(self, weight, x, add=None, *, prompt=False):
        out = real(self, weight, x, add, prompt=prompt)
        if weight.name == "output.weight":
            out[:] = np.nan
        return out

    monkeypatch.setattr(NativeKernels, "matmul", poisoned)
    async with Engine.open(toy) as engine:
        with pytest.raises(EngineError, match="NaN"):
            await collect(engine, "hello", LONG)
        await settled(engine)


async def test_closing_ends_running_requests_with_an_error(toy):
    """A reader that still waits gets one typed error, not silence."""
    context = Engine.open(toy)
    engine = await context.__aenter__()
    stream = engine.generate("hello", LONG)
    await anext(stream)
    await context.__aexit__(None, None, None)
    with pytest.raises(EngineClosedError):
        async for _ in stream:
            pass
    with pytest.raises(EngineClosedError, match="closed"):
        await collect(engine, "hello", LONG)


async def test_a_bug_in_the_loop_reaches_every_reader(toy, monkeypatch):
    """If our own code fails, readers and later callers get EngineError; nobody waits for ever."""
    async with Engine.open(toy) as engine:

        def fail(*args):
            raise ZeroDivisionError("a bug, as told")

        monkeypatch.setattr(engine._parts.step_loop._scheduler, "commit", fail)
        async with asyncio.timeout(10):
            assert engine.is_running
            with pytest.raises(EngineError, match="a bug, as told"):
                await collect(engine, "hello", LONG)
            await asyncio.to_thread(engine._thread.join)
            assert not engine.is_running
            with pytest.raises(EngineError):
                await collect(engine, "hello", LONG)


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"GGUF\x03\x00\x00\x00"])
async def test_opening_a_bad_file_is_a_typed_error(tmp_path, content):
    """The opener gets the reader's error, and no thread stays."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"bad\.gguf"):
        async with Engine.open(path):
            pass


async def test_a_context_beyond_the_model_is_a_config_error(toy):
    """The error names the flag and the limit."""
    config = EngineConfig(memory=MemoryConfig(max_context_tokens=513))
    with pytest.raises(ConfigError, match=r"--ctx is 513.*512"):
        async with Engine.open(toy, config):
            pass


async def test_an_engine_that_was_never_opened_says_so(toy):
    """Using the object without `async with` is explained."""
    with pytest.raises(EngineClosedError, match="async with"):
        await collect(Engine.open(toy)._engine, "hello", LONG)


async def test_the_engine_never_blocks_the_caller_s_loop(toy, monkeypatch):
    """A kernel that takes its time leaves the caller's loop free."""
    release = threading.Event()
    real = NativeDense.attention

    def slow(self, *args, **kwargs):
        release.wait(5)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(NativeDense, "attention", slow)
    async with Engine.open(toy) as engine:
        task = asyncio.create_task(collect(engine, "hello", SamplingParams(max_tokens=1)))
        async with asyncio.timeout(2):
            for _ in range(50):
                await asyncio.sleep(0)
        assert not task.done()
        release.set()
        await task


async def test_the_trace_shows_every_stage_and_channel(tmp_path, monkeypatch):
    """A saved trace holds spans of all stages on their lanes, channel counters, flows and the request."""
    # As if the experts were not in memory, so that they are read ahead.
    monkeypatch.setattr(ResidencyProbe, "is_resident", lambda _: False)
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape())
    from thermocline import PlacementConfig

    config = EngineConfig(
        trace=TraceConfig(enabled=True),
        placement=PlacementConfig(hot_device="cpu", hot_fraction=0.5),
    )
    async with Engine.open(path, config) as engine:
        await collect(engine, "hello", SamplingParams(max_tokens=5, ignore_eos=True))
        engine.save_trace(tmp_path / "trace.json.gz")
    events = read_chrome(tmp_path / "trace.json.gz").events
    lanes_of = {}
    for event in events:
        if type(event).__name__ == "SpanEvent":
            lanes_of.setdefault(str(event.name), set()).add(event.lane)
    for stage in ("embed", "attend", "router", "hot", "cold", "combine", "head"):
        assert lanes_of[stage] == {Lane.CPU}
    assert lanes_of["prefetch"] == {Lane.PAGECACHE}
    tracks = {event.track for event in events if type(event).__name__ == "CounterEvent"}
    names = {"embed", "attend", "router", "prefetch", "hot", "cold", "combine", "head", "results"}
    counts = {f"prefetch {name}" for name in ("hit", "late", "miss", "wasted")}
    counts |= {f"kv blocks {name}" for name in ("free", "cached", "held")} | {"bytes in flight"}
    assert tracks == {f"channel {name}" for name in names} | counts
    kinds = {type(event).__name__ for event in events}
    assert {"FlowEvent", "AsyncSpanEvent", "InstantEvent"} <= kinds


async def test_a_close_that_is_cancelled_closes_all_the_same(toy):
    """The caller may stop waiting for the end; the thread ends nevertheless, and readers are told."""
    context = Engine.open(toy)
    engine = await context.__aenter__()
    reader = asyncio.create_task(collect(engine, "hello", LONG))
    await accepted(engine, 1)
    closing = asyncio.create_task(context.__aexit__(None, None, None))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(EngineClosedError):
        await reader
    await asyncio.gather(closing, return_exceptions=True)
    await asyncio.to_thread(engine._thread.join)
    assert not engine.is_running


async def test_an_opening_that_is_cancelled_leaves_no_thread(toy, monkeypatch):
    """Cancelled twice while the file is being opened: the engine closes itself when it is open."""
    from thermocline.engine import thread as engine_thread

    entered, release = threading.Event(), threading.Event()
    real = engine_thread.load_parts

    def slow(*args):
        entered.set()
        release.wait(5)
        return real(*args)

    monkeypatch.setattr(engine_thread, "load_parts", slow)
    context = Engine.open(toy)
    opening = asyncio.create_task(context.__aenter__())
    await asyncio.to_thread(entered.wait, 5)
    opening.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    release.set()
    await asyncio.to_thread(context._engine._thread.join)


async def test_no_thread_to_be_had_is_a_typed_error(toy, monkeypatch):
    """A limit of the system is said, not waited for."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    async with asyncio.timeout(5):
        with pytest.raises(EngineError, match="no thread can be started"):
            async with Engine.open(toy):
                pass


async def test_leaving_a_held_request_starts_the_one_that_waits(toy):
    """A reader of scores that leaves between two chunks frees the cache for the next request."""
    config = EngineConfig(
        memory=MemoryConfig(max_full_contexts=1),
        scheduler=SchedulerConfig(prefill_chunk_tokens=16),
    )
    async with Engine.open(toy, config) as engine:
        scores = engine.score(list(range(250)))
        await anext(scores)
        waiting = asyncio.create_task(
            collect(engine, list(range(256)), SamplingParams(max_tokens=250, ignore_eos=True))
        )
        await accepted(engine, 2)
        await turns(engine, 50)
        assert not waiting.done()
        await scores.aclose()
        async with asyncio.timeout(20):
            assert (await waiting)[-1].finish_reason is FinishReason.LENGTH
        await settled(engine)


async def test_a_fault_in_sampling_fails_one_request_alone(toy, monkeypatch):
    """An exception that nobody foresaw while a token is chosen does not end the engine."""
    from thermocline.sampling.sampler import Sampler

    real, calls = Sampler.sample, []

    def fail_once(self, logits, output_ids):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("zero-size array, as told")
        return real(self, logits, output_ids)

    monkeypatch.setattr(Sampler, "sample", fail_once)
    async with Engine.open(toy) as engine:
        with pytest.raises(EngineError, match="ValueError: zero-size"):
            await collect(engine, "hello", LONG)
        assert await collect(engine, "hello", SamplingParams(max_tokens=3))
        await settled(engine)


@pytest.mark.parametrize("rows", [-3, 3])
async def test_a_vocabulary_that_does_not_fit_the_embedding_is_refused(tmp_path, rows):
    """More or fewer rows than tokens would fail in the middle of an answer: it fails at open."""
    shape = ToyShape(tied=True)
    weights = toy_weights(shape)
    embedding = weights["token_embd.weight"]
    weights["token_embd.weight"] = (
        embedding[:rows] if rows < 0 else np.concatenate([embedding, embedding[:rows]])
    )
    path = write_toy_model(tmp_path / "toy.gguf", shape, weights=weights)
    with pytest.raises(ModelFileError, match="the tokenizer has 264 tokens"):
        async with Engine.open(path):
            pass


async def test_a_prompt_of_millions_of_ids_is_refused_at_once(toy):
    """The length is looked at before the ids, so that the caller's loop is not held up."""

    class Endless:
        def __len__(self) -> int:
            return 8_000_000

        def __iter__(self):
            raise AssertionError("nobody may read the ids of a prompt that is too long")

    async with Engine.open(toy) as engine:
        with pytest.raises(PromptTooLongError, match="8000000 tokens"):
            await collect(engine, Endless(), LONG)


async def test_a_closed_engine_starts_no_template_process(toy):
    """A chat prompt after the end is a typed error; the child process would have no owner."""
    async with Engine.open(toy) as engine:
        pass
    with pytest.raises(EngineClosedError):
        await engine.encode_chat([{"role": "user", "content": "hello"}])
