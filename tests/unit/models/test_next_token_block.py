"""Blocks that guess further tokens: their numbers, what they read, and files that have none."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.block_runs import BlockRuns, chunk_of
from tests.support.compare import assert_within
from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from tests.support.toy_next_block import (
    BLOCK_TOKENS,
    DRAFTING_CASES,
    DRAFTING_TOYS,
    GOLDEN_BLOCKS,
    SEVERAL,
    case_name,
    chained_logits,
    next_block_metadata,
    next_block_weights,
    states_before,
    write_drafting_toy,
)
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kv.pool import KVPool
from thermocline.messages import SegmentKind
from thermocline.modelfile.reader import ModelFile, open_model_file
from thermocline.models import next_token_block
from thermocline.models.registry import can_draft, open_model, open_next_blocks, read_spec

KERNELS = {"reference": ReferenceKernels(), "native": NativeKernels(threads=1)}
QWEN = DRAFTING_TOYS["qwen35moe"]


def cache_of(block):
    """Room for a sequence."""
    return KVPool(block.kv_shapes, 8, 16, CacheType.F32)


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("name", "own_ends"), DRAFTING_CASES)
def test_logits_are_llama_cpps(tmp_path, name, own_ends, kernels):
    """With given states, and then with the block's own, or that of the block of the place before."""
    toy = DRAFTING_TOYS[name]
    path = write_drafting_toy(tmp_path / "m.gguf", toy, own_ends=own_ends)
    with open_model_file(path) as file, np.load(GOLDEN_BLOCKS) as golden:
        runs = BlockRuns(file, kernels)
        found = chained_logits(runs.run_block, len(runs.blocks), states_before(toy))
        assert_within(found, golden[case_name(name, own_ends)], "llama.cpp/F32")


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_a_cut_head_gives_the_first_logits(tmp_path, monkeypatch, kernels):
    """Bit for bit those of the whole one; a small vocabulary is not cut."""
    path = write_drafting_toy(tmp_path / "m.gguf", QWEN)
    with open_model_file(path) as file:
        assert open_next_blocks(file, kernels)[0].head_cuts == (264,)
        monkeypatch.setattr(next_token_block, "_LEAST_CUT_TOKENS", 0)
        (block,) = open_next_blocks(file, kernels)
        assert block.head_cuts == (66, 132, 264)
        states = states_before(QWEN)
        whole = block.logits(states)
        for cut in block.head_cuts:
            assert np.array_equal(block.logits(states, cut), whole[:, :cut])


@pytest.mark.parametrize("name", ["qwen35moe", "deepseek2"])
def test_rows_do_not_depend_on_their_chunk(tmp_path, name):
    """One by one they have the bits that they have together."""
    toy = DRAFTING_TOYS[name]
    with open_model_file(write_drafting_toy(tmp_path / "m.gguf", toy)) as file:
        (block,), before = open_next_blocks(file, KERNELS["native"]), states_before(toy)
        together = block.states(
            chunk_of(BLOCK_TOKENS, 0, SegmentKind.DECODE), before, cache_of(block)
        )
        cache = cache_of(block)
        for row, token in enumerate(BLOCK_TOKENS):
            chunk = chunk_of([token], row, SegmentKind.DECODE)
            alone = block.states(chunk, before[row : row + 1], cache)
            assert np.array_equal(alone[0], together[row])


def test_a_model_leaves_the_blocks_tensors_alone(tmp_path, monkeypatch):
    """Whoever does not draft never looks at them, and the block looks at no layer's."""
    seen: list[str] = []
    view = ModelFile.view
    monkeypatch.setattr(ModelFile, "view", lambda self, name: seen.append(name) or view(self, name))
    with open_model_file(write_drafting_toy(tmp_path / "m.gguf", QWEN, own_ends=True)) as file:
        open_model(file, ReferenceKernels())
        assert seen
        assert not [name for name in seen if name.startswith("blk.4.")]
        seen.clear()
        open_next_blocks(file, ReferenceKernels())
        assert {name.split(".")[1] for name in seen} == {"4"}


def test_a_file_without_a_block_says_so(tmp_path):
    """Of an architecture that can have one, and of one that can not."""
    for toy in (QWEN, ToyArch("olmoe", kv_heads=4)):
        with open_model_file(write_toy_arch(tmp_path / "m.gguf", toy)) as file:
            assert not can_draft(file, read_spec(file))
            with pytest.raises(UnsupportedModelError, match="0 such blocks"):
                open_next_blocks(file, ReferenceKernels())


@pytest.mark.parametrize("arch", SEVERAL)
def test_several_blocks_are_all_there(tmp_path, arch):
    """Each has what it has: heads of its own kind, a window, a dense feed-forward or a routed one; none may be missing."""
    toy = DRAFTING_TOYS[arch]
    path = write_drafting_toy(tmp_path / "m.gguf", toy)
    with open_model_file(path) as file:
        spec, blocks = read_spec(file), open_next_blocks(file, ReferenceKernels())
        assert len(blocks) == spec.num_predict_layers == SEVERAL[arch]
        assert tuple(block.kv_shapes[0] for block in blocks) == spec.next_block_shapes
        parts = [block._layer.parts for block in blocks]
        windows, routed = (
            [each.mixer.window for each in parts],
            [bool(each.routed) for each in parts],
        )
        expected = {
            "step35": ([16, 16, 0], [True, True, False]),
            "mimo2": ([16, 16, 0], [False, False, False]),
        }
        assert (windows, routed) == expected[arch]
        assert len(spec.kv_shapes) == len(spec.layer_kinds) == spec.num_layers
    last = f"blk.{toy.layers + SEVERAL[arch] - 1}.nextn.hnorm.weight"
    weights = toy_arch_weights(toy) | next_block_weights(toy)
    del weights[last]
    path = write_toy_arch(
        tmp_path / "n.gguf", toy, weights=weights, metadata=next_block_metadata(toy)
    )
    with open_model_file(path) as file, pytest.raises(ModelFileError, match="hnorm"):
        open_next_blocks(file, ReferenceKernels())


def test_a_block_with_other_tensors_is_refused(tmp_path):
    """One that is missing, and one that has no place."""
    weights = toy_arch_weights(QWEN) | next_block_weights(QWEN)
    keys = next_block_metadata(QWEN)
    lacking = {name: values for name, values in weights.items() if "hnorm" not in name}
    more = weights | {"blk.4.nextn.other.weight": np.zeros(4, np.float32)}
    for changed, error, what in (
        (lacking, ModelFileError, r"blk\.4\.nextn\.hnorm\.weight' is missing"),
        (more, UnsupportedModelError, "1 tensors have no place"),
    ):
        path = write_toy_arch(tmp_path / "m.gguf", QWEN, weights=changed, metadata=keys)
        with open_model_file(path) as file, pytest.raises(error, match=what):
            open_next_blocks(file, ReferenceKernels())
