"""gpt-oss: what its files say, where its biases lie, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.arch_cases import FORMULA_CASES
from tests.support.toy_archs import toy_arch_weights, write_toy_arch
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.experts.catalog import ExpertCatalog
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import ExpertKey, LayerIndex
from thermocline.modelfile.reader import open_model_file
from thermocline.models.blocks import plain_rope
from thermocline.models.footprint import measure_footprint
from thermocline.models.registry import open_model, read_spec
from thermocline.models.spec import LayerKind

TOY = FORMULA_CASES[0].toy


def opened(folder, toy=TOY, weights=None, **keys):
    """Open the model, and close it again."""
    metadata = {f"gpt-oss.{key}": value for key, value in keys.items()}
    path = write_toy_arch(folder / "toy.gguf", toy, weights=weights, metadata=metadata)
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def test_an_expert_has_its_biases_with_it(tmp_path):
    """Its bytes, spans and footprint count three matrices and three biases, and its bias is the file's."""
    weights = toy_arch_weights(TOY)
    path = write_toy_arch(tmp_path / "toy.gguf", TOY, weights=weights)
    with open_model_file(path) as file:
        catalog = ExpertCatalog(open_model(file, ReferenceKernels()).expert_layers)
        nbytes = 4 * (3 * TOY.hidden * TOY.intermediate + 2 * TOY.intermediate + TOY.hidden)
        assert catalog.expert_bytes(LayerIndex(1)) == nbytes
        spans = catalog.spans(ExpertKey.of(LayerIndex(1), 5))
        assert len(spans) == 6
        assert sum(span.end - span.start for span in spans) == nbytes
        router = read_spec(file).router
        assert measure_footprint(file.tensors.values(), router).expert_bytes == (nbytes,) * 4
        biases = catalog.stack(LayerIndex(1)).bias_parts
        for role, found in zip(("gate", "up", "down"), biases, strict=True):
            expected = weights[f"blk.1.ffn_{role}_exps.bias"][5]
            np.testing.assert_array_equal(found.raw[5, 0].view(np.float32), expected)


def test_even_layers_have_the_window(tmp_path):
    """As in the model's own code; a file may say it layer by layer, or name another period."""
    near, far = LayerKind.WINDOW, LayerKind.ATTENTION
    assert opened(tmp_path).spec.layer_kinds == (near, far, near, far)
    key = "attention.sliding_window_pattern"
    assert opened(tmp_path, **{key: 4}).spec.layer_kinds == (near, near, near, far)
    assert opened(tmp_path, **{key: 0}).spec.layer_kinds == (near,) * 4
    said = opened(tmp_path, **{key: [False, True, True, False]})
    assert said.spec.layer_kinds == (far, near, near, far)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_gating_func", 2),
        ("expert_weights_scale", 2.0),
        ("rope.dimension_count", 8),
    ],
)
def test_what_would_change_the_result_is_refused(tmp_path, key, value):
    """Keys whose values the architecture does not have."""
    with pytest.raises(UnsupportedModelError, match=key.replace(".", r"\.")):
        opened(tmp_path, **{key: value})


@pytest.mark.parametrize("missing", ["ffn_up_exps.bias", "attn_output.bias", "attn_sinks.weight"])
def test_a_missing_bias_is_named(tmp_path, missing):
    """All of them are there, or the file is damaged."""
    weights = toy_arch_weights(TOY)
    del weights[f"blk.2.{missing}"]
    with pytest.raises(ModelFileError, match=missing.replace(".", r"\.")):
        opened(tmp_path, weights=weights)


def test_scales_beside_biases_are_refused(tmp_path):
    """Such a file is none that a converter makes, and no kernel computes it."""
    weights = toy_arch_weights(TOY)
    weights["blk.0.ffn_up_exps.scale"] = np.ones(TOY.experts, np.float32)
    with pytest.raises(UnsupportedModelError, match=r"ffn_up_exps.*scales"):
        opened(tmp_path, replace(TOY, layers=4), weights=weights)


def test_the_ramp_of_yarn_is_not_rounded(tmp_path):
    """Between the pairs that turn 32 times and once over the original context, as the model's configuration says."""
    keys = {"rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 0.05}
    rule = plain_rope(opened(tmp_path, **keys).spec)
    low, high = (
        16 * np.log(64 / (turns * 2 * np.pi)) / (2 * np.log(rule.base)) for turns in (4.0, 0.05)
    )
    assert 0.5 < low < 1 < 4 < high < 5
    ramp = np.clip((np.arange(8) - low) / (high - low), 0, 1)
    plain = rule.base ** (-np.arange(8) / 8)
    np.testing.assert_allclose(rule.frequencies(), plain * (ramp / 8 + 1 - ramp), rtol=1e-6)
