"""Exact makespans on a virtual clock: the real ring, joins and channels over lanes with given times."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from itertools import pairwise

import pytest

from benchmarks.null_model import NullModel, null_graph
from tests.support.chunks import make_chunk, make_decode
from tests.support.virtual_time import Busy, VirtualLane, run_virtually
from thermocline.config import SchedulerConfig
from thermocline.kv.blocks import BlockAllocator
from thermocline.messages import RequestId, RequestOptions
from thermocline.pipeline.execution.policy import Load
from thermocline.pipeline.execution.runner import Runner
from thermocline.pipeline.scheduling.scheduler import Scheduler
from thermocline.pipeline.step_loop import StepLoop
from thermocline.sampling.params import SamplingParams
from thermocline.traces.lanes import Name
from thermocline.traces.recorder import NullRecorder


def times(*, attend: float = 0, hot: float = 0, cold: float = 0, head: float = 0):
    """Return how long a job takes by its name alone."""
    seconds = {Name.ATTEND: attend, Name.HOT: hot, Name.COLD: cold, Name.HEAD: head}
    return lambda name, chunk, counts: seconds.get(name, 0.0)


def run(chunks, seconds_of, *, layers=4, credits=1, hot=True) -> list[Busy]:
    """Return what the lanes did while `chunks` went through, as many in flight as there are credits."""
    done: list[Busy] = []

    async def main() -> None:
        cpu = VirtualLane("cpu", seconds_of, done)
        device = VirtualLane("hot", seconds_of, done) if hot else None
        graph, fused = null_graph(NullModel(layers), cpu, device, credits=credits)
        load = Load(other_lanes_have_work=hot)
        runner = Runner(graph, NullRecorder(), cpu, lambda chunk: load, fused)
        waiting = list(chunks)
        while waiting or runner.num_in_flight:
            while waiting and runner.has_credit:
                runner.inject(waiting.pop(0))
            await runner.receive()
        runner.check_integrity()
        runner.close()

    run_virtually(main())
    return done


def makespan(done: list[Busy]) -> float:
    return max(busy.end_s for busy in done) - min(busy.start_s for busy in done)


def lower_bound(done: list[Busy], layers: int, chain_per_layer: float) -> float:
    """Return the larger of the busiest lane's sum and one chunk's dependency chain."""
    sums: defaultdict[str, float] = defaultdict(float)
    for busy in done:
        sums[busy.lane] += busy.end_s - busy.start_s
    return max(*sums.values(), layers * chain_per_layer)


def prompts(count: int, requests: int = 1):
    return [make_chunk(number, num_tokens=8, request=number % requests) for number in range(count)]


@pytest.mark.parametrize(("hot", "cold"), [(2.0, 5.0), (5.0, 2.0), (3.0, 3.0)])
def test_one_chunk_takes_attention_and_the_longer_branch_of_each_layer(hot, cold):
    """Hot and cold experts of a layer run at the same time, and nothing else does."""
    done = run(prompts(1), times(attend=1.0, hot=hot, cold=cold))
    assert makespan(done) == pytest.approx(4 * (1.0 + max(hot, cold)))


def test_without_a_device_the_cpu_never_idles():
    """All jobs are the CPU's: two chunks take the sum of their times, in any number in flight."""
    for credits in (1, 2, 3, 4):
        done = run(prompts(6), times(attend=1.0, cold=2.5), credits=credits, hot=False)
        assert makespan(done) == pytest.approx(6 * 4 * 3.5)


@pytest.mark.parametrize(("credits", "run_length"), [(1, 1), (2, 2), (4, 4)])
def test_chunks_in_flight_follow_each_other_layer_by_layer(credits, run_length):
    """A layer is computed for all of them before the next one, so that what was read for the first serves all."""
    layers = 3
    done = run(prompts(4), times(attend=1.0, cold=2.0), layers=layers, credits=credits, hot=False)
    jobs = sorted((busy for busy in done if busy.name is Name.COLD), key=lambda busy: busy.start_s)
    first = [(busy.chunk, busy.layer) for busy in jobs[: layers * run_length]]
    assert first == [(chunk, layer) for layer in range(layers) for chunk in range(run_length)]


def test_two_chunks_in_flight_fill_each_other_s_gaps():
    """One chunk alone leaves the CPU idle while the device computes; a second one takes that time."""
    given = times(attend=1.0, hot=2.0, cold=1.0)
    alone = makespan(run(prompts(4), given, credits=1))
    both = makespan(run(prompts(4), given, credits=2))
    assert alone == pytest.approx(4 * 4 * 3.0)
    # The device's sum, one attention before its first job, and one before the second pair's first.
    assert both == pytest.approx(4 * 4 * 2.0 + 1.0 + 1.0)


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize(
    ("attend", "hot", "cold"), [(1.0, 2.0, 1.0), (1.0, 1.0, 3.0), (1.0, 4.0, 0.5), (2.0, 1.0, 1.0)]
)
def test_the_wavefront_is_within_a_twentieth_of_the_lower_bound(attend, hot, cold, requests):
    """Whichever lane is the bottleneck, it is busy nearly all the time with two chunks in flight."""
    layers = 48
    done = run(
        prompts(8, requests), times(attend=attend, hot=hot, cold=cold), layers=layers, credits=2
    )
    bound = lower_bound(done, layers, attend + max(hot, cold))
    assert makespan(done) <= 1.05 * bound


def test_a_decode_step_takes_the_sum_of_its_jobs():
    """Nothing lies between its stages."""
    done = run([make_decode(make_chunk(0))], times(attend=1.0, cold=2.0, head=3.0), hot=False)
    assert makespan(done) == pytest.approx(4 * 3.0 + 3.0)
    assert [busy.name for busy in done].count(Name.ATTEND) == 4


def test_a_decode_step_waits_for_one_layer_of_a_prompt_at_most():
    """It overtakes every prompt's layer that has not begun, and is not torn apart by any."""
    seconds = times(attend=1.0, cold=4.0, head=1.0)
    chunks = [*prompts(2), make_decode(make_chunk(2, request=9))]
    done = run(chunks, seconds, credits=3, hot=False)
    step = [busy for busy in done if busy.chunk == 2]
    assert step[0].start_s <= 5.0
    assert makespan(step) == pytest.approx(4 * 5.0 + 1.0)


def test_a_lost_overlap_would_fail():
    """With a device that waits for the CPU's experts the makespan is that of a sequence: larger."""
    given = times(attend=1.0, hot=2.0, cold=2.0)
    overlapped = makespan(run(prompts(1), given))
    one_after_the_other = makespan(run(prompts(1), times(attend=1.0, cold=4.0), hot=False))
    assert one_after_the_other == pytest.approx(overlapped + 4 * 2.0)


class Asked:
    """Stands in for a Generation: writes down when each of its tokens came, on the virtual clock."""

    def __init__(self, request: int, prompt: int, count: int) -> None:
        self.request, self.prompt = (
            RequestId(request),
            list(range(1000 * request, 1000 * request + prompt)),
        )
        self.params = SamplingParams(max_tokens=count)
        self.options = RequestOptions()
        self.has_started = False
        self.max_new_tokens = 0
        self.times: list[float] = []
        self.looks: list[tuple[float, int, int]] = []
        self.ended = asyncio.Event()

    @property
    def num_known(self) -> int:
        """Tokens of its prompt, and of its answer so far."""
        return len(self.prompt) + len(self.times)

    def start(self, num_cached: int) -> None:
        """Its first chunk is on its way."""
        self.has_started = True

    def prompt_under_way(self, first: int, num_done: int) -> None:
        self.looks.append((asyncio.get_running_loop().time(), first, num_done))

    def prompt_computed(self, num_computed: int, logits, states) -> None:
        """Nobody watches."""

    def advance(self, logits) -> int | None:
        self.times.append(asyncio.get_running_loop().time())
        if len(self.times) < self.max_new_tokens:
            return 7
        self.ended.set()
        return None

    def end(self, reason) -> None:
        """Closed with its work done."""

    def fail(self, error) -> None:
        raise error


def serve(asked: list[Asked], seconds_of, *, hot: bool, slowdown: float = 2.0) -> list[Busy]:
    """Let the real scheduler and step loop serve all requests, in chunks of 8 prompt tokens."""
    done: list[Busy] = []

    async def main() -> None:
        cpu = VirtualLane("cpu", seconds_of, done, slowdown)
        device = VirtualLane("hot", seconds_of, done) if hot else None
        config = SchedulerConfig(prefill_chunk_tokens=8, max_prompt_chunks=2, prefix_cache=False)
        credits = config.max_prompt_chunks + 1
        graph, fused = null_graph(NullModel(4), cpu, device, credits=credits)
        load = Load(other_lanes_have_work=hot)
        runner = Runner(graph, NullRecorder(), cpu, lambda chunk: load, fused)
        scheduler = Scheduler(config, BlockAllocator(256, 4), 512)
        loop = StepLoop(scheduler, runner, NullRecorder())
        async with asyncio.TaskGroup() as group:
            group.create_task(loop.run())
            await asyncio.sleep(0)
            for one in asked:
                loop.submit(one)
            await asyncio.gather(*(one.ended.wait() for one in asked))
            loop.check_integrity()
            loop.close()

    run_virtually(main())
    return done


def test_the_scheduler_keeps_every_lane_as_busy_as_it_can_be():
    """A long prompt through scheduler, loop and ring takes at most 1.05 of its lower bound."""
    asked = [Asked(1, 160, 1)]
    done = serve(asked, times(attend=1.0, hot=2.0, cold=1.0), hot=True)
    assert len({busy.chunk for busy in done}) == 20
    assert makespan(done) <= 1.05 * lower_bound(done, 4, 3.0)


def test_answers_beside_a_prompt_wait_as_long_as_was_agreed():
    """Four answers come as one step; with a long prompt beside them a token takes twice as long."""
    alone = [Asked(n, 1, 30) for n in range(1, 5)]
    serve(alone, times(attend=1.0, cold=1.0), hot=False)
    beside = [Asked(n, 1, 30) for n in range(1, 5)]
    done = serve([*beside, Asked(9, 400, 1)], times(attend=1.0, cold=1.0), hot=False)
    for quiet, busy in zip(map(median_gap, alone), map(median_gap, beside), strict=True):
        assert quiet == pytest.approx(4 * 2.0)
        assert quiet < busy <= 2.0 * quiet
    assert sum(b.end_s - b.start_s for b in done) == pytest.approx(makespan(done))


def test_a_prompt_tells_how_far_its_chunk_is():
    """Four times a second, by the layers that a chunk has wholly behind it, and never after its end."""
    asked = Asked(1, 16, 1)
    # Chunks of 8 tokens through 4 layers of 2 s.
    serve([asked], times(attend=1.0, cold=1.0), hot=False)
    at_s = sorted({time_s for time_s, _, _ in asked.looks})
    assert {round(b - a, 6) for a, b in pairwise(at_s)} == {0.25}
    for first in (0, 8):
        # A layer that is one job counts when the next one is through; a chunk without any has nothing to say.
        told = [done for _, begin, done in asked.looks if begin == first and done]
        assert told == sorted(told)
        assert set(told) == {2, 4}
    assert max(at_s) <= asked.times[0]


def median_gap(asked: Asked) -> float:
    return statistics.median(b - a for a, b in pairwise(asked.times))


def test_only_prompts_beside_answers_give_their_lane_back_between_stages(monkeypatch):
    """A prompt that nobody waits behind walks layer by layer, its last chunk, too."""
    in_parts: list[tuple[RequestId, bool]] = []
    inject = Runner.inject

    def noting(self, chunk, **how):
        if chunk.is_prompt:
            in_parts.append((chunk.segments[0].request, how["is_beside_answers"]))
        inject(self, chunk, **how)

    monkeypatch.setattr(Runner, "inject", noting)
    serve([Asked(1, 12, 2)], times(attend=1.0, cold=1.0), hot=False)
    assert in_parts == [(1, False), (1, False)]
    in_parts.clear()
    serve([Asked(1, 1, 9), Asked(2, 12, 1)], times(attend=1.0, cold=1.0), hot=False)
    assert set(in_parts) == {(1, False), (2, True)}
