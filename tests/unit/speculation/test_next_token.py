"""The drafter over a file's own block: whatever steps led to a state, it drafts what the block alone gives there."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.followed_trunk import BLOCK, chunk_of
from tests.support.toy_next_block import DRAFTING_TOYS, write_drafting_toy
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.messages import RequestId
from thermocline.modelfile.reader import open_model_file
from thermocline.models import next_token_block
from thermocline.models.registry import open_next_blocks
from thermocline.speculation import chains, next_token
from thermocline.speculation.contract import Draft, DraftWish, Verified
from thermocline.speculation.next_token import NextTokenDrafter

NUM_BLOCKS = 64
KERNELS = NativeKernels(threads=1)
ONE, TWO = RequestId(1), RequestId(2)
SEQUENCE = [int(t) for t in np.random.default_rng(2).integers(0, 256, 60)]


@pytest.fixture(scope="module", params=["glm4moe", "step35"])
def file(tmp_path_factory, request):
    """A model with a block of plain attention, and one with a block for each of three places."""
    path = tmp_path_factory.mktemp("drafts") / "m.gguf"
    with open_model_file(write_drafting_toy(path, DRAFTING_TOYS[request.param])) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _every_guess_counts(monkeypatch):
    """A random model is never sure."""
    monkeypatch.setattr(chains, "MIN_CONFIDENCE", 0.0)


class Trunk:
    """A drafter with a trunk before it, whose state at a position is made of the tokens up to there."""

    def __init__(self, file) -> None:
        blocks = open_next_blocks(file, KERNELS)
        rng = np.random.default_rng(4)
        self._table = rng.standard_normal((256, blocks[0].spec.hidden_size)).astype(np.float32)
        self.drafter = NextTokenDrafter(
            blocks, lambda x: x, CacheType.F32, NUM_BLOCKS, BLOCK, max_requests=2
        )

    def most(self, count):
        """How many tokens a draft of at most so many has."""
        return min(count, self.drafter.facts.max_tokens)

    def state(self, tokens, position):
        """Made of the last two tokens."""
        return self._table[tokens[position]] - 0.5 * self._table[tokens[max(position - 1, 0)]]

    def compute(self, request, tokens, start, end, *, blocks, prompt=False, drafted=0):
        """Let a chunk of tokens[start:end] go by."""
        chunk = chunk_of(request, tokens, start, end, blocks=blocks, prompt=prompt, drafted=drafted)
        x = np.stack([self.state(tokens, position) for position in range(start, end)])
        self.drafter.hidden_computed(chunk, x)

    def step(self, request, known, drafted, chosen, *, blocks):
        """Let a decode step go by: the newest known token, and drafted ones, of which the first chosen ones are right."""
        start = len(known) - 1
        tokens = [*known, *drafted]
        self.compute(request, tokens, start, len(tokens), blocks=blocks, drafted=len(drafted))
        right = 0
        while right < min(len(drafted), len(chosen)) and drafted[right] == chosen[right]:
            right += 1
        verified = Verified(request, start, tuple(chosen), len(drafted), right, "mtp")
        assert len(chosen) == right + 1, "a step chooses one token more than it accepts"
        self.drafter.observe(verified)

    def propose(self, request, known, count=4):
        """What it drafts after these tokens."""
        drafts = self.drafter.propose([DraftWish(request, len(known), known[-1], count)])
        assert len(drafts) == 1
        return drafts[0]


@pytest.fixture
def trunk(file):
    """A trunk with nothing computed."""
    return Trunk(file)


def expected(file, known, count=4):
    """The draft of a drafter that saw these tokens as one prompt."""
    trunk = Trunk(file)
    trunk.drafter.begin(ONE, known[:-1])
    trunk.compute(ONE, known, 0, len(known) - 1, blocks=range(NUM_BLOCKS), prompt=True)
    return trunk.propose(ONE, known, count)


def same(found, draft):
    """Whether two drafts have the same tokens, and confidences to the bit."""
    return (found.tokens, found.confidence) == (draft.tokens, draft.confidence)


@pytest.mark.parametrize(("tokens", "most"), [(range(60), 66), (range(66, 126), 132)])
def test_drafts_are_taken_from_the_tokens_that_a_request_uses(file, monkeypatch, tokens, most):
    """A request of frequent tokens asks for the first rows of the head, its drafts are the best of these."""
    known = [*tokens] * 3
    plain = expected(file, known, count=1)
    monkeypatch.setattr(next_token_block, "_LEAST_CUT_TOKENS", 0)
    trunk, asked = Trunk(file), []
    block = trunk.drafter._blocks[0]
    logits = block.logits

    def seen(states, num_tokens):
        found = logits(states, num_tokens)
        asked.append((num_tokens, int(found[0].argmax()), int(logits(states)[0].argmax())))
        return found

    monkeypatch.setattr(block, "logits", seen)
    trunk.drafter.begin(ONE, known[:-1])
    trunk.compute(ONE, known, 0, len(known) - 1, blocks=range(NUM_BLOCKS), prompt=True)
    draft = trunk.propose(ONE, known, 1)
    assert [(most, draft.tokens[0])] == [each[:2] for each in asked]
    assert asked[0][2] == plain.tokens[0]
    # The answer goes on with rare tokens: the whole head comes back.
    for _ in range(60):
        trunk.drafter.observe(Verified(ONE, len(known) - 1, (250,), 0, 0, "mtp"))
    assert trunk.drafter._shares[ONE].chosen() == 264


@pytest.mark.parametrize("cuts", [[1], [4, 8], [3, 5, 6, 17], [16]])
def test_a_prompt_in_chunks_is_a_prompt(file, trunk, cuts):
    """The state before a chunk crosses from the one before."""
    known = SEQUENCE[:21]
    trunk.drafter.begin(ONE, known[:-1])
    ends = [*cuts, 20]
    for start, end in zip([0, *cuts], ends, strict=True):
        trunk.compute(ONE, known, start, end, blocks=range(5, 20), prompt=True)
    found = trunk.propose(ONE, known)
    assert found.parents == tuple(range(-1, trunk.most(4) - 1))
    assert found.num_known == 21
    assert same(found, expected(file, known))


@pytest.mark.parametrize("num_prompt", [1, 2, 7, 8, 9])
def test_steps_with_right_and_wrong_drafts_are_a_prompt(file, trunk, num_prompt):
    """Rows of wrong drafts leave nothing behind; right ones are computed again with the trunk's states."""
    blocks = [9, 3, 30, 11, 40, 2, 17, 5, 22, 33, 8, 1, 0, 60, 61]
    known = SEQUENCE[:num_prompt]
    trunk.drafter.begin(ONE, known)
    trunk.compute(ONE, known, 0, num_prompt, blocks=blocks, prompt=True)
    known = SEQUENCE[: num_prompt + 1]
    rng = np.random.default_rng(num_prompt)
    while len(known) < 50:
        if rng.random() < 0.8:  # a step now and then is not drafted for
            count = int(rng.integers(1, 5))  # blocks of places behind it are not asked
            assert same(trunk.propose(ONE, known, count), expected(file, known, count))
        right, wrong = (int(n) for n in rng.integers(0, 4, 2))
        following = SEQUENCE[len(known) : len(known) + right + 1]
        drafted = [*following[:-1], *(int(t) for t in rng.integers(0, 256, wrong))]
        if wrong and drafted[right] == following[-1]:
            drafted[right] = (following[-1] + 1) % 256
        trunk.step(ONE, known, drafted, following, blocks=blocks)
        known = SEQUENCE[: len(known) + right + 1]


def test_requests_are_drafted_for_together(file, trunk):
    """Each gets what it gets alone, and the blocks of neither are written by the other."""
    first, second = SEQUENCE[:9], SEQUENCE[20:33]
    for request, known, blocks in ((ONE, first, range(10)), (TWO, second, range(10, 20))):
        trunk.drafter.begin(request, known[:-1])
        trunk.compute(request, known, 0, len(known) - 1, blocks=blocks, prompt=True)
    for _ in range(2):
        drafts = trunk.drafter.propose(
            [DraftWish(ONE, len(first), first[-1], 6), DraftWish(TWO, len(second), second[-1], 3)]
        )
        assert [draft.request for draft in drafts] == [ONE, TWO]
        assert same(drafts[0], expected(file, first, 6))
        assert same(drafts[1], expected(file, second, 3))


def test_a_request_that_begins_behind_a_found_prefix_goes_on(file, trunk):
    """Another computed the blocks; the state before the first new token is kept with them."""
    known = SEQUENCE[:15]
    trunk.drafter.begin(ONE, known)
    trunk.compute(ONE, known, 0, 10, blocks=range(10), prompt=True)
    trunk.drafter.end(ONE)
    trunk.drafter.begin(TWO, known[:-1])
    trunk.compute(TWO, known, 8, 14, blocks=[0, 1, 30, 31], prompt=True)
    assert same(trunk.propose(TWO, known), expected(file, known))


def test_a_request_that_is_computed_again_goes_on(file, trunk):
    """After a preemption its tokens come once more, in other blocks."""
    known = SEQUENCE[:14]
    trunk.drafter.begin(ONE, known[:8])
    trunk.compute(ONE, known, 0, 8, blocks=range(10), prompt=True)
    for end in range(9, 14):
        trunk.step(ONE, known[:end], [], [known[end]], blocks=range(10))
    trunk.compute(ONE, known, 0, 8, blocks=range(20, 30), prompt=True)
    trunk.compute(ONE, known, 8, 13, blocks=range(20, 30))
    assert same(trunk.propose(ONE, known), expected(file, known))


def test_what_it_keeps_is_bounded(file, trunk, monkeypatch):
    """Nobody drafts for long: what is kept of a request stays bounded, and drafts go on behind the gap."""
    monkeypatch.setattr(next_token, "_MAX_KEPT_ROWS", 5)
    known = SEQUENCE[:4]
    trunk.drafter.begin(ONE, known[:3])
    trunk.compute(ONE, known, 0, 3, blocks=range(20), prompt=True)
    for end in range(4, 40):
        trunk.step(ONE, SEQUENCE[:end], [], [SEQUENCE[end]], blocks=range(20))
        (followed,) = trunk.drafter._followed.values()
        assert len(followed.states) == len(followed.tokens) <= 5
    assert len(trunk.propose(ONE, SEQUENCE[:40]).tokens) == trunk.most(4)


def test_an_unlikely_guess_ends_a_draft(file, trunk, monkeypatch):
    """Confidence says how likely each token was; below the least one a draft ends, be it at its first token."""
    known = SEQUENCE[:21]
    trunk.drafter.begin(ONE, known[:-1])
    trunk.compute(ONE, known, 0, 20, blocks=range(20), prompt=True)
    confidence = trunk.propose(ONE, known, 8).confidence
    assert len(confidence) == trunk.most(8)
    assert all(0 < value <= 1 for value in confidence)
    lowest = int(np.argmin(confidence))
    monkeypatch.setattr(chains, "MIN_CONFIDENCE", np.nextafter(min(confidence), 2))
    wish = DraftWish(ONE, len(known), known[-1], 8)
    drafts = trunk.drafter.propose([wish])
    assert [draft.confidence for draft in drafts] == [confidence[:lowest]] * (lowest > 0)


def test_nobody_it_was_not_told_of_gets_a_draft(trunk):
    """A request that never began, one that ended, and one whose tokens it lacks."""
    known = SEQUENCE[:9]
    trunk.compute(ONE, known, 0, 8, blocks=range(20), prompt=True)
    wish = DraftWish(ONE, len(known), known[-1], 2)
    assert trunk.drafter.propose([wish]) == []
    trunk.drafter.begin(ONE, known[:-1])
    trunk.compute(ONE, known, 0, 6, blocks=range(20), prompt=True)
    assert trunk.drafter.propose([wish]) == []
    trunk.compute(ONE, known, 6, 8, blocks=range(20), prompt=True)
    found = trunk.drafter.propose([wish])
    assert found == [Draft.chain(wish, found[0].tokens, found[0].confidence)]
    trunk.drafter.end(ONE)
    trunk.drafter.end(ONE)
    assert trunk.drafter.propose([wish]) == []
