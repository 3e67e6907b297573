"""Block diffusion drafters against llama.cpp on the same files: the model's layers in, the block's logits out."""

from __future__ import annotations

import pytest

pytest.importorskip("llama_cpp")

from tests.oracle.llama_dflash import LlamaBlockDrafter
from tests.support.compare import assert_within
from tests.support.dflash_runs import block_logits, trunk_features
from tests.support.oracle_cases import prompt_ids
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_dflash import MASK_TOKEN, TARGET, TOYS, write_toy_drafter

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("num_tokens", [1, 30])
def test_toy_drafters_agree(tmp_path, name, num_tokens):
    """With windows, partial rotation, and ends of its own. Their features come from their model, ours from ours."""
    toy = TOYS[name]
    target = write_toy_arch(tmp_path / "target.gguf", TARGET)
    path = write_toy_drafter(tmp_path / "drafter.gguf", toy)
    ids = prompt_ids(num_tokens)
    block = [77] + [MASK_TOKEN] * (toy.block - 1)
    with LlamaBlockDrafter(target, path, toy.layers_read) as llama:
        theirs = llama.features(ids)
        expected = llama.draft(theirs, block)
    ours = trunk_features(target, ids, toy.layers_read)
    assert_within(ours, theirs, "llama.cpp/F32")
    assert_within(block_logits(target, path, ours, block), expected, "llama.cpp/F32")
