"""The drafter over a block diffusion model: whatever steps led to a state, it drafts what a prompt alone gives there."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.followed_trunk import BLOCK, FollowedTrunk, same
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_dflash import TARGET, TOYS, write_toy_drafter
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.messages import RequestId
from thermocline.modelfile.reader import open_model_file
from thermocline.models.dflash import DFlashModel
from thermocline.models.registry import read_spec
from thermocline.speculation import dflash
from thermocline.speculation.contract import DraftWish
from thermocline.speculation.dflash import DFlashDrafter

NUM_BLOCKS = 64
KERNELS = NativeKernels(threads=1)
ONE, TWO = RequestId(1), RequestId(2)
SEQUENCE = [int(t) for t in np.random.default_rng(2).integers(0, 256, 60)]
STATES = np.random.default_rng(4).standard_normal((5, 256, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and a drafter with a window for it."""
    folder = tmp_path_factory.mktemp("drafts")
    target = write_toy_arch(folder / "target.gguf", TARGET)
    path = write_toy_drafter(folder / "drafter.gguf", TOYS["window"])
    with open_model_file(target) as file, open_model_file(path) as own:
        yield file, own


@pytest.fixture(autouse=True)
def _every_guess_counts(monkeypatch):
    """A random model is never sure."""
    monkeypatch.setattr(dflash, "_MIN_CONFIDENCE", 0.0)


class Trunk(FollowedTrunk):
    """A drafter with layers before it, whose inputs at a position are made of the last two tokens."""

    def __init__(self, files, *, is_tree=False) -> None:
        file, own = files
        model = DFlashModel(own, file, read_spec(file), KERNELS)
        drafter = DFlashDrafter(
            model, CacheType.F32, NUM_BLOCKS, BLOCK, max_requests=2, is_tree=is_tree
        )
        super().__init__(drafter, STATES)


def expected(files, known, count=7, *, is_tree=False):
    """The draft of a drafter that saw these tokens as one prompt."""
    trunk = Trunk(files, is_tree=is_tree)
    trunk.drafter.begin(ONE, known[:-1])
    trunk.compute(ONE, known, 0, len(known) - 1, blocks=range(NUM_BLOCKS), prompt=True)
    return trunk.propose(ONE, known, count)


@pytest.mark.parametrize("cuts", [[1], [4, 8], [3, 5, 6, 17], [16]])
def test_a_prompt_in_chunks_is_a_prompt(files, cuts):
    """Whatever its chunks were."""
    trunk, known = Trunk(files), SEQUENCE[:21]
    trunk.drafter.begin(ONE, known[:-1])
    for start, end in zip([0, *cuts], [*cuts, 20], strict=True):
        trunk.compute(ONE, known, start, end, blocks=range(5, 20), prompt=True)
    found = trunk.propose(ONE, known)
    assert found.parents == tuple(range(-1, 6))
    assert found.num_known == 21
    assert same(found, expected(files, known))


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("num_prompt", [1, 7, 8])
def test_steps_with_right_and_wrong_drafts_are_a_prompt(files, monkeypatch, num_prompt, is_tree):
    """Rows of wrong drafts leave nothing behind, and what nobody drafts for is computed some time."""
    monkeypatch.setattr(dflash, "_MAX_KEPT_ROWS", 5)
    blocks = [9, 3, 30, 11, 40, 2, 17, 5, 22, 33, 8, 1, 0, 60, 61, 62]
    trunk, known = Trunk(files, is_tree=is_tree), SEQUENCE[:num_prompt]
    trunk.drafter.begin(ONE, known)
    trunk.compute(ONE, known, 0, num_prompt, blocks=blocks, prompt=True)
    known = SEQUENCE[: num_prompt + 1]
    rng = np.random.default_rng(num_prompt)
    while len(known) < 50:
        if rng.random() < 0.4:
            found = trunk.propose(ONE, known)
            assert same(found, expected(files, known, is_tree=is_tree))
        right, wrong = (int(n) for n in rng.integers(0, 4, 2))
        following = SEQUENCE[len(known) : len(known) + right + 1]
        drafted = [*following[:-1], *(int(t) for t in rng.integers(0, 256, wrong))]
        trunk.step(ONE, known, drafted, following, blocks=blocks)
        known = SEQUENCE[: len(known) + right + 1]
        (followed,) = trunk.drafter._followed.values()
        assert len(followed.states) <= 5 + 8


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


def test_a_request_that_begins_behind_a_found_prefix_goes_on(files):
    """Another computed the blocks."""
    trunk, known = Trunk(files), SEQUENCE[:15]
    trunk.drafter.begin(ONE, known)
    trunk.compute(ONE, known, 0, 10, blocks=range(10), prompt=True)
    trunk.drafter.end(ONE)
    trunk.drafter.begin(TWO, known[:-1])
    trunk.compute(TWO, known, 8, 14, blocks=[0, 1, 30, 31], prompt=True)
    assert same(trunk.propose(TWO, known), expected(files, known))


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


def test_trees_fill_their_room(files):
    """So many nodes as were asked for, parents first, none behind the last place that the answer may have."""
    found = expected(files, SEQUENCE[:21], 3, is_tree=True)
    assert len(found.tokens) == 3
    assert all(parent < node for node, parent in enumerate(found.parents))
    assert len(expected(files, SEQUENCE[:21], 16, is_tree=True).tokens) == 16


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
