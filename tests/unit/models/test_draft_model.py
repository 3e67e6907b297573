"""A small model as a drafter: its logits are its own, whichever kernels compute it, and its tokens the larger one's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.block_runs import chunk_of
from tests.support.compare import assert_within
from tests.support.toy_archs import ToyArch, toy_arch_metadata, write_toy_arch
from thermocline.errors import UnsupportedModelError
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kv.pool import KVPool
from thermocline.messages import SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models.draft_model import DraftModel, require_same_vocabulary

SMALL = ToyArch("qwen3", layers=2, experts=0)


@pytest.mark.parametrize("kind", list(SegmentKind))
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_parts_and_whole_layers_agree(tmp_path, num_tokens, kind):
    """A token that only the larger model has counts as the first one."""
    path = write_toy_arch(tmp_path / "m.gguf", SMALL)
    ids = [(7 * n) % 200 for n in range(num_tokens)]
    found = []
    with open_model_file(path) as file:
        for kernels in (NativeKernels(threads=1), ReferenceKernels()):
            for last in (0, 100_000):
                model = DraftModel(file, file, kernels)
                pool = KVPool(model.kv_shapes, 8, 16, CacheType.F32)
                states = model.states(chunk_of([*ids, last], 0, kind), np.empty((0, 0)), pool)
                found.append(model.logits(states))
    native, other, slow, _ = found
    assert np.array_equal(native, other)
    assert_within(native, slow, "reference/float32")


def test_each_cache_has_its_own_keys(tmp_path):
    """A drafted token behind a prompt, in one cache and in another one after it: equal, and not what the first left."""
    path = write_toy_arch(tmp_path / "m.gguf", SMALL)
    with open_model_file(path) as file:
        model, found = DraftModel(file, file, NativeKernels(threads=1)), []
        for prompt in ([3, 5, 8], [9, 5, 8], [3, 5, 8]):
            pool = KVPool(model.kv_shapes, 8, 16, CacheType.F32)
            model.states(chunk_of(prompt, 0, SegmentKind.PROMPT), np.empty((0, 0)), pool)
            step = chunk_of([13], len(prompt), SegmentKind.DECODE)
            found.append(model.states(step, np.empty((0, 0)), pool).copy())
    assert np.array_equal(found[0], found[2])
    assert not np.array_equal(found[0], found[1])


def test_vocabularies_are_compared(tmp_path):
    """Further tokens at the end of one are none of the other's; another token is named."""
    tokens = list(toy_arch_metadata(SMALL)["tokenizer.ggml.tokens"])
    longer = {"tokenizer.ggml.tokens": [*tokens, "more"]}
    other = {"tokenizer.ggml.tokens": ["x", *tokens[1:]]}
    paths = [
        write_toy_arch(tmp_path / f"{n}.gguf", SMALL, metadata=changed)
        for n, changed in enumerate((None, longer, other))
    ]
    with (
        open_model_file(paths[0]) as plain,
        open_model_file(paths[1]) as more,
        open_model_file(paths[2]) as differs,
    ):
        require_same_vocabulary(plain, more)
        require_same_vocabulary(more, plain)
        with pytest.raises(UnsupportedModelError, match=r"1 of \d+ tokens differ.*token 0 is 'x'"):
            require_same_vocabulary(differs, plain)
