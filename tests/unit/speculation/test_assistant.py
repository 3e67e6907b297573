"""Gemma 4's own drafter over a model's cache: whatever steps led to a state, it guesses what a prompt alone gives there."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.assistant_runs import opened_assistant, placed_chunk
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_assistant import PAIRS, write_assistant
from thermocline.messages import RequestId, SegmentKind
from thermocline.speculation import chains
from thermocline.speculation.assistant import AssistantDrafter
from thermocline.speculation.contract import DraftWish, Verified

BLOCK, NUM_BLOCKS = 4, 64
ONE, TWO = RequestId(1), RequestId(2)
SEQUENCE = [int(t) for t in np.random.default_rng(2).integers(0, 256, 60)]
BLOCKS = [9, 3, 30, 11, 40, 2, 17, 5, 22, 33, 8, 1, 0, 60, 61, 62]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and its drafter."""
    folder = tmp_path_factory.mktemp("drafts")
    return (
        write_toy_arch(folder / "target.gguf", PAIRS["readers"].target),
        write_assistant(folder / "drafter.gguf", PAIRS["readers"]),
    )


@pytest.fixture
def opened(files):
    """Both, and an empty cache."""
    with opened_assistant(*files, num_blocks=NUM_BLOCKS, block_tokens=BLOCK) as found:
        yield found


@pytest.fixture(autouse=True)
def _every_guess_counts(monkeypatch):
    """A random model is never sure."""
    monkeypatch.setattr(chains, "MIN_CONFIDENCE", 0.0)


class Run:
    """A drafter with the model's layers before it."""

    def __init__(self, opened) -> None:
        self.trunk, model, self.cache = opened
        self.drafter = AssistantDrafter(model, self.trunk.model.final_norm, self.cache.kv)

    def compute(self, request, tokens, start, end, *, blocks=BLOCKS, prompt=False, drafted=0):
        """Let a chunk of tokens[start:end] go by. Its windows lie in other blocks than the rest."""
        table = np.array(blocks, np.int32)[: -(-end // BLOCK)]
        chunk = placed_chunk(
            tokens[start:end],
            start,
            table,
            (table + 7) % NUM_BLOCKS,
            kind=SegmentKind.PROMPT if prompt else SegmentKind.DECODE,
            request=request,
            block_tokens=BLOCK,
            num_drafted=drafted,
        )
        self.drafter.hidden_computed(chunk, self.trunk.run(chunk, self.cache))

    def step(self, request, known, drafted, chosen, *, blocks=BLOCKS):
        """Let a decode step go by: the newest known token, and drafted ones, of which the first chosen ones are right."""
        start, tokens = len(known) - 1, [*known, *drafted]
        self.compute(request, tokens, start, len(tokens), blocks=blocks, drafted=len(drafted))
        right = len(chosen) - 1
        assert drafted[:right] == chosen[:right]
        self.drafter.observe(Verified(request, start, tuple(chosen), len(drafted), right))

    def begin(self, request, known, *, blocks=BLOCKS):
        """Let a prompt go by, whose answer has its first token."""
        self.drafter.begin(request, known[:-1])
        self.compute(request, known, 0, len(known) - 1, blocks=blocks, prompt=True)

    def propose(self, request, known, count=5):
        """What it drafts after these tokens."""
        (draft,) = self.drafter.propose([DraftWish(request, len(known), known[-1], count)])
        return draft


def expected(files, known, count=5):
    """The draft of a drafter that saw these tokens as one prompt."""
    with opened_assistant(*files, num_blocks=NUM_BLOCKS, block_tokens=BLOCK) as found:
        run = Run(found)
        run.begin(ONE, known)
        return run.propose(ONE, known, count)


def same(found, draft) -> bool:
    """Whether two drafts are the same chain. States come from a prompt's products, or a step's."""
    return (found.tokens, found.parents) == (draft.tokens, draft.parents) and np.allclose(
        found.confidence, draft.confidence, rtol=1e-3
    )


@pytest.mark.parametrize("cuts", [[1], [4, 8], [3, 5, 6, 17]])
def test_a_prompt_in_chunks_is_a_prompt(files, opened, cuts):
    """Whatever its chunks were."""
    run, known = Run(opened), SEQUENCE[:41]
    run.drafter.begin(ONE, known[:-1])
    for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
        run.compute(ONE, known, start, end, prompt=True)
    found = run.propose(ONE, known)
    assert found.parents == (-1, 0, 1, 2, 3)
    assert found.num_known == 41
    assert same(found, expected(files, known))


@pytest.mark.parametrize("num_prompt", [1, 8])
def test_steps_with_right_and_wrong_drafts_are_a_prompt(files, opened, num_prompt):
    """What wrong rows left in the cache is behind what a guess sees, and the state is that of the last right row."""
    run, known = Run(opened), SEQUENCE[: num_prompt + 1]
    run.begin(ONE, known)
    rng = np.random.default_rng(num_prompt)
    num_compared = 0
    while len(known) < 50:
        if rng.random() < 0.4:
            assert same(run.propose(ONE, known), expected(files, known))
            num_compared += 1
        right, wrong = (int(n) for n in rng.integers(0, 4, 2))
        following = SEQUENCE[len(known) : len(known) + right + 1]
        drafted = [*following[:-1], *(int(t) for t in rng.integers(0, 256, wrong))]
        run.step(ONE, known, drafted, following)
        known = SEQUENCE[: len(known) + right + 1]
    assert num_compared > 3


def test_requests_are_drafted_for_together(files, opened):
    """Each gets what it gets alone, of its own length."""
    run, first, second = Run(opened), SEQUENCE[:9], SEQUENCE[20:43]
    run.begin(ONE, first, blocks=range(10))
    run.begin(TWO, second, blocks=range(20, 30))
    for _ in range(2):
        drafts = run.drafter.propose(
            [DraftWish(ONE, len(first), first[-1], 6), DraftWish(TWO, len(second), second[-1], 3)]
        )
        assert same(drafts[0], expected(files, first, 6))
        assert same(drafts[1], expected(files, second, 3))


def test_a_request_that_begins_behind_a_found_prefix_goes_on(files, opened):
    """Another computed the blocks; there is nothing that the drafter must have seen of it."""
    run, known = Run(opened), SEQUENCE[:15]
    run.compute(TWO, known, 0, 12, blocks=range(10), prompt=True)
    run.drafter.begin(ONE, known[:-1])
    run.compute(ONE, known, 12, 14, blocks=[0, 1, 2, 31], prompt=True)
    assert same(run.propose(ONE, known), expected(files, known))


def test_a_request_that_is_computed_again_goes_on(files, opened):
    """After a preemption its tokens come once more, in other blocks."""
    run, known = Run(opened), SEQUENCE[:14]
    run.begin(ONE, known[:9])
    run.step(ONE, known[:9], [], [known[9]])
    run.compute(ONE, known, 0, 8, blocks=range(20, 30), prompt=True)
    run.compute(ONE, known, 8, 13, blocks=range(20, 30), prompt=True)
    assert same(run.propose(ONE, known), expected(files, known))


def test_an_unlikely_guess_ends_a_draft(opened, monkeypatch):
    """One that is less likely than the least is none, and a draft of none is left out."""
    run, known = Run(opened), SEQUENCE[:14]
    run.begin(ONE, known)
    confidence = run.propose(ONE, known, 8).confidence
    least = sorted(confidence)[3]
    monkeypatch.setattr(chains, "MIN_CONFIDENCE", least)
    kept = next(n for n, each in enumerate(confidence) if each < least)
    wish = DraftWish(ONE, len(known), known[-1], 8)
    assert [len(draft.tokens) for draft in run.drafter.propose([wish])] == [kept] * bool(kept)
    monkeypatch.setattr(chains, "MIN_CONFIDENCE", 1.1)
    assert run.drafter.propose([wish]) == []


def test_behind_a_tree_it_waits_for_the_next_step(files, opened):
    """Its blocks have changed, and it knows not which of a window's."""
    run, known = Run(opened), SEQUENCE[:12]
    run.begin(ONE, known[:9])
    run.compute(ONE, known, 8, 11, drafted=2)
    run.drafter.observe(Verified(ONE, 8, (known[9], known[10]), 2, 1, rows=(2,)))
    assert run.drafter.propose([DraftWish(ONE, 11, known[10], 3)]) == []
    run.step(ONE, known[:11], [], [known[11]])
    assert len(run.drafter.propose([DraftWish(ONE, 12, known[11], 3)])) == 1


def test_nobody_it_was_not_told_of_gets_a_draft(opened):
    """A request that never began, one that ended, and one whose tokens it lacks."""
    run, known = Run(opened), SEQUENCE[:9]
    run.compute(ONE, known, 0, 8, prompt=True)
    wish = DraftWish(ONE, len(known), known[-1], 2)
    assert run.drafter.propose([wish]) == []
    run.drafter.begin(ONE, known[:-1])
    assert run.drafter.propose([wish]) == []
    run.compute(ONE, known, 0, 6, prompt=True)
    assert run.drafter.propose([wish]) == []
    run.compute(ONE, known, 6, 8, prompt=True)
    assert len(run.drafter.propose([wish])) == 1
    run.drafter.observe(Verified(TWO, 8, (1,), 0, 0))
    run.drafter.end(ONE)
    run.drafter.end(ONE)
    assert run.drafter.propose([wish]) == []
    assert "0 requests" in repr(run.drafter)
