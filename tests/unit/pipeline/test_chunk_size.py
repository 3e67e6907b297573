"""The chunk's size follows the latency target on simulated machines, and does not flap."""

from __future__ import annotations

import itertools
import random

import pytest

from thermocline.pipeline.chunk_size import ChunkSizer


class Machine:
    """A prompt job takes a + b * tokens, a step alone idle_s, and it waits for `waits` jobs."""

    def __init__(self, a, b, idle_s, *, waits=16.0, noise=0.0, seed=1):
        self.a, self.b, self.idle_s, self.waits, self.noise = a, b, idle_s, waits, noise
        self._random = random.Random(seed)

    def _noisy(self, seconds: float) -> float:
        return seconds * (1 + self.noise * self._random.uniform(-1, 1))

    def job_s(self, tokens: int) -> float:
        return self._noisy(self.a + self.b * tokens)

    def step_s(self, tokens_beside: int) -> float:
        job_s = self.a + self.b * tokens_beside if tokens_beside else 0.0
        return self._noisy(self.idle_s + self.waits * job_s)

    def best(self, sizes, slowdown: float) -> int:
        allowed = (slowdown - 1) * self.idle_s
        fitting = [size for size in sizes if self.waits * (self.a + self.b * size) <= allowed]
        return fitting[-1] if fitting else sizes[0]

    def run(self, sizer: ChunkSizer, chunks: int, *, num_decoding=1) -> list[int]:
        """Compute prompt chunks beside decode steps and return the sizes that were chosen."""
        chosen = []
        for _ in range(chunks):
            tokens = sizer.chunk_tokens(num_decoding)
            chosen.append(tokens)
            sizer.observe_prompt(tokens, self.job_s(tokens))
            sizer.observe_decode(num_decoding, self.step_s(tokens), beside_tokens=tokens)
        return chosen

    def idle_steps(self, sizer: ChunkSizer, steps: int = 20, *, num_decoding=1) -> None:
        for _ in range(steps):
            sizer.observe_decode(num_decoding, self.step_s(0), beside_tokens=0)


SIZES = [32, 64, 128, 256, 512]


@pytest.mark.parametrize("prior", [2.0, 16.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("b", [3e-5, 1e-5, 5e-6, 1e-6])
def test_the_largest_chunk_that_keeps_the_target_is_found(b, noise, prior):
    """Within one size of the best, whatever was believed before measuring, and on the safe side."""
    machine = Machine(2e-4, b, 0.05, noise=noise)
    sizer = ChunkSizer(512, 1.8, prior)
    machine.idle_steps(sizer)
    last = machine.run(sizer, 100)[-1]
    best = machine.best(SIZES, 1.8)
    assert best / 2 <= last <= best


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_move_the_size_to_and_fro(seed):
    """After the start, measurements that vary by a tenth change the size at most once."""
    machine = Machine(2e-4, 1e-5, 0.05, noise=0.1, seed=seed)
    sizer = ChunkSizer(512, 1.8, 16.0)
    machine.idle_steps(sizer)
    settled = machine.run(sizer, 300)[50:]
    assert sum(a != b for a, b in itertools.pairwise(settled)) <= 1


def test_nobody_who_decodes_means_full_size():
    """The target is about answers; without any, prompts go as fast as they can."""
    sizer = ChunkSizer(512, 1.8, 16.0)
    assert sizer.chunk_tokens(0) == 512
    assert sizer.chunk_tokens(3) == 32, "nothing is measured yet"
    assert sizer.chunk_tokens(0) == 512


def test_a_step_that_was_never_alone_still_lets_the_chunk_grow():
    """Under a steady load of prompts no idle step is seen; the fastest one stands for it."""
    machine = Machine(1e-4, 1e-6, 0.05)
    assert machine.run(ChunkSizer(512, 1.8, 16.0), 50)[-1] == 512


def test_a_machine_that_becomes_slower_gets_smaller_chunks():
    """Old measurements are forgotten."""
    sizer = ChunkSizer(512, 1.8, 16.0)
    fast, slow = Machine(1e-4, 1e-6, 0.05), Machine(1e-4, 2e-5, 0.05)
    fast.idle_steps(sizer)
    assert fast.run(sizer, 50)[-1] == 512
    assert slow.run(sizer, 100)[-1] <= slow.best(SIZES, 1.8)


def test_steps_of_more_answers_may_wait_longer():
    """The time alone is known for each number of answers; of others the most similar one counts."""
    sizer = ChunkSizer(512, 1.8, 16.0)
    one, eight = Machine(2e-4, 1e-5, 0.02), Machine(2e-4, 1e-5, 0.12)
    one.idle_steps(sizer, num_decoding=1)
    eight.idle_steps(sizer, num_decoding=8)
    small = one.run(sizer, 60, num_decoding=1)[-1]
    assert small < eight.run(sizer, 60, num_decoding=8)[-1]
    assert sizer.chunk_tokens(7) == sizer.chunk_tokens(8)


def test_no_slowdown_at_all_means_the_smallest_chunk():
    """The least that makes progress is 32 tokens, or what the user allows if that is less."""
    machine = Machine(1e-4, 1e-6, 0.05)
    sizer = ChunkSizer(512, 1.0, 16.0)
    machine.idle_steps(sizer)
    assert set(machine.run(sizer, 20)) == {32}
    assert ChunkSizer(5, 1.8, 16.0).chunk_tokens(1) == 5


@pytest.mark.parametrize(("limit", "sizes"), [(512, SIZES), (100, [32, 64, 100]), (32, [32])])
def test_sizes_double_up_to_what_is_allowed(limit, sizes):
    """The setting is the largest size, a power or not."""
    sizer = ChunkSizer(limit, 1.8, 1.0)
    machine = Machine(0.0, 1e-7, 0.05, waits=1.0)
    machine.idle_steps(sizer)
    assert set(machine.run(sizer, 50)) <= set(sizes)
    assert repr(sizer) == f"ChunkSizer({limit} of {limit} tokens)"
