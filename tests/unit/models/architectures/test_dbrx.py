"""DBRX: what its files state, and that the limit of queries, keys and values is where it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.support.changed_toys import spec_of, write_changed
from tests.support.toy_archs import ToyArch, toy_arch_weights
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model

TOY = ToyArch("dbrx", used=3)


def test_what_a_file_states(tmp_path):
    """Norms take the mean off, weights of experts sum to one, and an expert is as wide as the file's feed-forward."""
    spec = spec_of(write_changed(tmp_path, TOY))
    assert spec.norms_center
    assert not spec.norms_have_bias
    assert spec.router.normalize_top_k
    assert spec.expert_intermediate_size == TOY.intermediate
    assert spec.attention_clip == np.float32(1.2)
    assert not spec.cpu_only


def test_its_parts(tmp_path):
    """Both norms of a layer and the last one take the mean off; q, k and v are rows of one tensor, in this order."""
    weights = toy_arch_weights(TOY)
    with open_model_file(str(write_changed(tmp_path, TOY))) as file:
        model = open_model(file, ReferenceKernels())
        parts = model.non_expert.layers[1]
        for centering in (parts.centering, parts.mixer.centering, model.non_expert.centering):
            assert centering is not None
            assert centering.bias is None
        np.testing.assert_array_equal(parts.norm, weights["blk.1.attn_output_norm.weight"])
        rows = np.cumsum([part.rows for part in (parts.mixer.q, parts.mixer.k, parts.mixer.v)])
        assert rows.tolist() == [64, 96, 128]
        assert parts.mixer.clip == np.float32(1.2)


def test_a_limit_of_zero_is_none(tmp_path):
    """As llama.cpp takes it."""
    toy = replace(TOY, extra={"attention.clamp_kqv": 0.0})
    assert spec_of(write_changed(tmp_path, toy)).attention_clip == 0.0
