"""The drafter over an EAGLE-3 file: whatever steps led to a state, it drafts what a prompt alone gives there."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.followed_trunk import BLOCK, FollowedTrunk, made_inputs, same
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_eagle3 import EAGLES, tokens_of_rows, write_eagle
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.messages import RequestId
from thermocline.modelfile.reader import open_model_file
from thermocline.models.eagle3 import Eagle3Model, StatedTokens
from thermocline.models.registry import read_spec
from thermocline.speculation import chains, eagle3
from thermocline.speculation.contract import DraftWish, Verified
from thermocline.speculation.eagle3 import Eagle3Drafter

NUM_BLOCKS = 64
KERNELS = NativeKernels(threads=1)
ONE, TWO = RequestId(1), RequestId(2)
TOY = EAGLES["rows"]
SEQUENCE = [int(t) for t in np.random.default_rng(2).integers(0, 256, 60)]
STATES = np.random.default_rng(4).standard_normal((3, 256, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and a drafter of a part of its vocabulary."""
    folder = tmp_path_factory.mktemp("drafts")
    target = write_toy_arch(folder / "target.gguf", TOY.target)
    path = write_eagle(folder / "drafter.gguf", TOY)
    with open_model_file(target) as file, open_model_file(path) as own:
        yield file, own


@pytest.fixture(autouse=True)
def _every_guess_counts(monkeypatch):
    """A random model is never sure."""
    monkeypatch.setattr(chains, "MIN_CONFIDENCE", 0.0)


class Trunk(FollowedTrunk):
    """A drafter with layers before it."""

    def __init__(self, files) -> None:
        file, own = files
        model = Eagle3Model(own, file, read_spec(file), KERNELS)
        drafter = Eagle3Drafter(model, CacheType.F32, NUM_BLOCKS, BLOCK, max_requests=2)
        super().__init__(drafter, STATES)


def expected(files, known, count=7):
    """The draft of a drafter that saw these tokens as one prompt."""
    trunk = Trunk(files)
    trunk.drafter.begin(ONE, known[:-1])
    trunk.compute(ONE, known, 0, len(known) - 1, blocks=range(NUM_BLOCKS), prompt=True)
    return trunk.propose(ONE, known, count)


def test_a_draft_is_the_likeliest_token_one_after_the_other(files):
    """By the model itself, over all pairs of a token and the position before, of which the first token is none's."""
    known, trunk = SEQUENCE[:21], Trunk(files)
    model, tokens = trunk.drafter._model, list(known[1:])
    given = made_inputs(STATES, known, 0, 20)
    inputs = np.concatenate([given[layer] for layer in TOY.layers_read], axis=1)
    states = list(model.fuse(inputs, prompt=True))
    drafted, confidence = [], []
    for _ in range(7):
        positions = np.arange(1, len(tokens) + 1, dtype=np.int32)
        rows = StatedTokens(np.array(tokens, np.int32), np.stack(states), positions, positions)
        table = np.arange(NUM_BLOCKS, dtype=np.int32)
        state = model.states(rows, [table] * len(tokens), trunk.drafter._cache)[-1]
        logits = model.logits(state[None])[0].astype(np.float64)
        shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        drafted.append(int(tokens_of_rows(TOY)[shares.argmax()]))
        confidence.append(shares.max())
        tokens.append(drafted[-1])
        states.append(state)
    found = expected(files, known)
    assert found.is_chain
    assert found.num_known == 21
    assert list(found.tokens) == drafted
    assert np.allclose(found.confidence, confidence, rtol=1e-4)


@pytest.mark.parametrize("cuts", [[1], [4, 8], [3, 5, 6, 17], [16]])
def test_a_prompt_in_chunks_is_a_prompt(files, cuts):
    """Whatever its chunks were."""
    trunk, known = Trunk(files), SEQUENCE[:21]
    trunk.drafter.begin(ONE, known[:-1])
    for start, end in zip([0, *cuts], [*cuts, 20], strict=True):
        trunk.compute(ONE, known, start, end, blocks=range(5, 20), prompt=True)
    assert same(trunk.propose(ONE, known), expected(files, known))


@pytest.mark.parametrize("num_prompt", [1, 7, 8])
def test_steps_with_right_and_wrong_drafts_are_a_prompt(files, monkeypatch, num_prompt):
    """Rows of wrong drafts leave nothing behind, and what nobody drafts for is computed some time."""
    monkeypatch.setattr(eagle3, "_MAX_KEPT_ROWS", 5)
    blocks = [9, 3, 30, 11, 40, 2, 17, 5, 22, 33, 8, 1, 0, 60, 61, 62]
    trunk, known = Trunk(files), SEQUENCE[:num_prompt]
    trunk.drafter.begin(ONE, known)
    trunk.compute(ONE, known, 0, num_prompt, blocks=blocks, prompt=True)
    known = SEQUENCE[: num_prompt + 1]
    rng = np.random.default_rng(num_prompt)
    num_steps = 0
    while len(known) < 50:
        if num_steps < 3 or num_steps % 6 == 0:
            assert same(trunk.propose(ONE, known), expected(files, known))
        num_steps += 1
        right, wrong = (int(n) for n in rng.integers(0, 4, 2))
        following = SEQUENCE[len(known) : len(known) + right + 1]
        drafted = [*following[:-1], *(int(t) for t in rng.integers(0, 256, wrong))]
        trunk.step(ONE, known, drafted, following, blocks=blocks)
        known = SEQUENCE[: len(known) + right + 1]
        (of_request,) = trunk.drafter._known.values()
        assert len(of_request.rows.states) <= 5 + 8
    assert same(trunk.propose(ONE, known), expected(files, known))


def test_requests_are_drafted_for_together(files):
    """Each gets what it gets alone, and the blocks of neither are written by the other."""
    trunk, first, second = Trunk(files), SEQUENCE[:9], SEQUENCE[20:43]
    for request, known, blocks in ((ONE, first, range(10)), (TWO, second, range(10, 20))):
        trunk.drafter.begin(request, known[:-1])
        trunk.compute(request, known, 0, len(known) - 1, blocks=blocks, prompt=True)
    for _ in range(2):
        drafts = trunk.drafter.propose(
            [DraftWish(ONE, len(first), first[-1], 6), DraftWish(TWO, len(second), second[-1], 3)]
        )
        assert same(drafts[0], expected(files, first, 6))
        assert same(drafts[1], expected(files, second, 3))


def test_requests_that_share_a_prefix_go_on_apart(files):
    """Another computed the blocks; the token behind them differs, and what the first one drafts stays the same."""
    trunk, known = Trunk(files), SEQUENCE[:15]
    other = [*known[:8], *SEQUENCE[30:37]]
    trunk.drafter.begin(ONE, known)
    trunk.compute(ONE, known, 0, 14, blocks=range(10), prompt=True)
    trunk.drafter.begin(TWO, other[:-1])
    trunk.compute(TWO, other, 8, 14, blocks=[0, 1, 30, 31], prompt=True)
    assert same(trunk.propose(TWO, other), expected(files, other))
    assert same(trunk.propose(ONE, known), expected(files, known))


def test_a_request_that_is_computed_again_goes_on(files):
    """After a preemption its tokens come once more, in other blocks."""
    trunk, known = Trunk(files), SEQUENCE[:14]
    trunk.drafter.begin(ONE, known[:8])
    trunk.compute(ONE, known, 0, 8, blocks=range(10), prompt=True)
    for end in range(9, 14):
        trunk.step(ONE, known[:end], [], [known[end]], blocks=range(10))
    trunk.compute(ONE, known, 0, 8, blocks=range(20, 30), prompt=True)
    trunk.compute(ONE, known, 8, 13, blocks=range(20, 30))
    assert same(trunk.propose(ONE, known), expected(files, known))


def test_blocks_of_a_branch_take_the_place_of_a_requests(files):
    """Behind another drafter's tree, whose right rows lie in blocks of their own."""
    trunk, known = Trunk(files), SEQUENCE[:10]
    trunk.drafter.begin(ONE, known[:-1])
    trunk.compute(ONE, known, 0, 9, blocks=range(10), prompt=True)
    # Behind position 9 a wrong token, then the right two in a branch, which begins in the block of position 8.
    tokens, right = [*known, 200, *SEQUENCE[10:12]], made_inputs(STATES, SEQUENCE, 9, 12)
    given = {layer: rows[[0, 0, 1, 2]] for layer, rows in right.items()}
    trunk.compute(ONE, tokens, 9, 13, blocks=range(10), drafted=3, given=given)
    chosen, moved = tuple(SEQUENCE[10:13]), ((2, 50), (3, 51))
    trunk.drafter.observe(Verified(ONE, 9, chosen, 3, 2, rows=(2, 3), moved=moved))
    known = SEQUENCE[:13]
    assert same(trunk.propose(ONE, known), expected(files, known))
    trunk.drafter._cache.keys[2:4] = 7
    assert same(trunk.propose(ONE, known), expected(files, known)), "those blocks are another's"


def test_a_guess_that_is_not_likely_ends_a_draft(files, monkeypatch):
    """The others of the step go on."""
    trunk = Trunk(files)
    for request, known, blocks in (
        (ONE, SEQUENCE[:9], range(10)),
        (TWO, SEQUENCE[9:20], range(10, 20)),
    ):
        trunk.drafter.begin(request, known[:-1])
        trunk.compute(request, known, 0, len(known) - 1, blocks=blocks, prompt=True)
    wishes = [DraftWish(ONE, 9, SEQUENCE[8], 4), DraftWish(TWO, 11, SEQUENCE[19], 4)]
    whole = trunk.drafter.propose(wishes)
    guess = Eagle3Drafter.guess
    monkeypatch.setattr(chains, "MIN_CONFIDENCE", 0.5)

    def doubting(self, wish, index, logits):
        token, _ = guess(self, wish, index, logits)
        return token, 0.4 if (wish.request, index) == (ONE, 1) else 0.9

    monkeypatch.setattr(Eagle3Drafter, "guess", doubting)
    found = trunk.drafter.propose(wishes)
    assert [draft.tokens for draft in found] == [whole[0].tokens[:1], whole[1].tokens]


def test_nobody_it_was_not_told_of_gets_a_draft(files):
    """A request that never began, one that ended, and one whose tokens it lacks."""
    trunk, known = Trunk(files), SEQUENCE[:9]
    trunk.compute(ONE, known, 0, 8, blocks=range(20), prompt=True)
    wish = DraftWish(ONE, len(known), known[-1], 2)
    assert trunk.drafter.propose([wish]) == []
    trunk.drafter.begin(ONE, known[:-1])
    assert trunk.drafter.propose([wish]) == []
    trunk.compute(ONE, known, 0, 6, blocks=range(20), prompt=True)
    assert trunk.drafter.propose([wish]) == []
    trunk.compute(ONE, known, 6, 8, blocks=range(20), prompt=True)
    assert len(trunk.drafter.propose([wish])) == 1
    trunk.drafter.end(ONE)
    trunk.drafter.end(ONE)
    assert trunk.drafter.propose([wish]) == []
