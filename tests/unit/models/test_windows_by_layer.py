"""What layers with a window and layers that see all tokens have of their own."""

from __future__ import annotations

import math
from dataclasses import replace

from tests.support.toy_archs import ToyArch, write_toy_arch
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.models.rope import RopeRule, Yarn
from thermocline.models.spec import WindowSpec


def opened(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def test_exaone_turns_where_it_has_a_window(tmp_path):
    """Every fourth layer sees all tokens and does not turn; blocks behind the last layer are in no pattern."""
    toy = ToyArch("exaone-moe", layers=5, window=16)
    rope = RopeRule(16, 10000.0)
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy))
    assert model.spec.window == WindowSpec(16, rope)
    assert model.non_expert.ropes == (rope, rope, rope, None, rope)
    keys = {"exaone-moe.nextn_predict_layers": 1, "exaone-moe.block_count": 6}
    keys["exaone-moe.attention.sliding_window_pattern"] = [False, True, True, True, False]
    model = opened(write_toy_arch(tmp_path / "n.gguf", toy, metadata=keys))
    assert (model.spec.num_layers, model.spec.num_predict_layers) == (5, 1)
    assert model.non_expert.ropes == (None, rope, rope, rope, None)


def test_mellum_stretches_layers_that_see_all(tmp_path):
    """A scaled rotary embedding is that of layers without a window alone, which all are where the file has none."""
    scaled = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    toy = replace(ToyArch("mellum", layers=5, window=16), extra=scaled)
    near, far = (
        RopeRule(16, 10000.0, scaling)
        for scaling in (None, Yarn(4.0, 64, 32.0, 1.0, 0.1 * math.log(4.0) + 1.0))
    )
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy))
    assert model.non_expert.ropes == (near, near, near, far, near)
    model = opened(write_toy_arch(tmp_path / "n.gguf", replace(toy, window=0)))
    assert model.non_expert.ropes == (far,) * 5
    assert model.spec.window is None
