"""Footprint: which bytes are experts, which are not, and what a token reads."""

from __future__ import annotations

import pytest

from tests.support.fused_projections import fused
from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.modelfile.formats import FORMATS_BY_NAME
from thermocline.modelfile.layout import TensorInfo
from thermocline.modelfile.reader import open_model_file
from thermocline.models.footprint import FormatShare, Role, measure_footprint, tensor_role
from thermocline.models.router_rule import RouterRule

ROUTER = RouterRule(num_experts=8, num_experts_used=2, normalize_top_k=True)


def _tensor(name, *shape, kind="F32"):
    block = FORMATS_BY_NAME[kind]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return TensorInfo(name, shape, block, "m.gguf", 0, 0, rows * block.row_bytes(shape[-1]))


def _model(*, tied=False):
    tensors = [
        _tensor("token_embd.weight", 100, 32),
        _tensor("output_norm.weight", 32),
        _tensor("blk.0.attn_q.weight", 32, 32, kind="Q8_0"),
        _tensor("blk.0.ffn_gate_inp.weight", 8, 32),
        _tensor("blk.0.ffn_gate_exps.weight", 8, 16, 32, kind="Q4_0"),
        _tensor("blk.0.ffn_up_exps.weight", 8, 16, 32, kind="Q4_0"),
        _tensor("blk.0.ffn_down_exps.weight", 8, 32, 32, kind="Q8_0"),
        _tensor("blk.2.ffn_down_exps.weight", 8, 32, 32, kind="Q4_0"),
    ]
    return tensors if tied else [*tensors, _tensor("output.weight", 100, 32)]


GATE = 16 * 18
DOWN_Q8, DOWN_Q4 = 32 * 34, 32 * 18
REST = 32 * 4 + 32 * 34 + 8 * 32 * 4
TABLE = 100 * 32 * 4


def test_experts_and_the_rest_add_up():
    """Every tensor is either a routed expert or not, and experts are counted layer by layer."""
    footprint = measure_footprint(_model(), ROUTER)
    assert footprint.experts_bytes == 8 * (2 * GATE + DOWN_Q8 + DOWN_Q4)
    assert footprint.trunk_bytes == 2 * TABLE + REST
    assert footprint.total_bytes == footprint.trunk_bytes + footprint.experts_bytes
    assert footprint.expert_bytes == (2 * GATE + DOWN_Q8, 0, DOWN_Q4)


def test_a_token_reads_one_row_of_the_table_and_its_own_experts():
    """The embedding table counts as one row, the experts by the share that a token uses."""
    footprint = measure_footprint(_model(), ROUTER)
    experts = 2 * (2 * GATE + DOWN_Q8 + DOWN_Q4)
    assert footprint.token_bytes == 32 * 4 + TABLE + REST + experts


def test_a_tied_table_is_read_whole():
    """Where the embedding is the output too, a token needs all of it."""
    footprint = measure_footprint(_model(tied=True), ROUTER)
    experts = 2 * (2 * GATE + DOWN_Q8 + DOWN_Q4)
    assert footprint.token_bytes == TABLE + REST + experts


def test_parameters_count_weights_not_bytes():
    """All weights, and those that one token uses."""
    footprint = measure_footprint(_model(), ROUTER)
    routed = 8 * 32 * (16 + 16 + 32 + 32)
    rest = 32 + 32 * 32 + 8 * 32
    assert footprint.num_parameters == 2 * 3200 + rest + routed
    assert footprint.num_active_parameters == 3200 + 32 + rest + routed // 4


def test_without_a_router_nothing_is_claimed_about_a_token():
    """Sizes are known of any file; the cost of a token only where the router is."""
    footprint = measure_footprint(_model(), None)
    assert footprint.token_bytes is None
    assert footprint.num_active_parameters is None
    assert footprint.total_bytes > 0


def test_formats_are_grouped_by_role():
    """Each role's formats stand together, the largest first."""
    shares = measure_footprint(_model(), ROUTER).formats
    experts = [share for share in shares if share.role is Role.EXPERTS]
    assert experts == [
        FormatShare(Role.EXPERTS, "Q4_0", 3, 8 * (2 * GATE + DOWN_Q4)),
        FormatShare(Role.EXPERTS, "Q8_0", 1, 8 * DOWN_Q8),
    ]
    assert sum(share.total_bytes for share in shares) == 2 * TABLE + REST + 8 * (
        2 * GATE + DOWN_Q8 + DOWN_Q4
    )


def test_a_file_without_tensors_has_no_bytes():
    """Nothing adds up to nothing."""
    footprint = measure_footprint([], ROUTER)
    assert (footprint.total_bytes, footprint.expert_bytes, footprint.formats) == (0, (), ())


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("token_embd.weight", Role.EMBEDDING),
        ("output.weight", Role.OUTPUT),
        ("output_norm.weight", Role.NORM),
        ("blk.3.attn_q_norm.weight", Role.NORM),
        ("blk.3.attn_output.weight", Role.ATTENTION),
        ("blk.3.ffn_gate_inp.weight", Role.ROUTER),
        ("blk.3.ffn_gate_exps.weight", Role.EXPERTS),
        ("blk.3.ffn_gate_shexp.weight", Role.SHARED),
        ("rope_freqs.weight", Role.OTHER),
    ],
)
def test_roles_follow_the_names(name, role):
    """The common GGUF names say what a tensor is for."""
    assert tensor_role(name) is role


def test_products_named_as_attentions_may_feed_a_state(tmp_path):
    """Kimi Linear's: 14 tensors of a layer with a state beside its norms, and five of one that attends."""
    toy = ToyArch("kimi-linear", layers=2, interval=2, head_dim=24, rotary=8)
    path = write_toy_arch(tmp_path / "toy.gguf", toy)
    with open_model_file(path) as file:
        shares = measure_footprint(file.tensors.values(), None).formats
    found = {share.role: share.num_tensors for share in shares}
    assert (found[Role.STATE], found[Role.ATTENTION]) == (14, 5), found


def test_fused_projections_are_attention_where_there_is_no_state(tmp_path):
    """attn_qkv is a recurrent layer's input, or attention's three projections in one."""
    for arch, role in (("olmoe", Role.ATTENTION), ("qwen35moe", Role.STATE)):
        toy = ToyArch(arch, layers=2, interval=2, rotary=8, kv_heads=4)
        path = write_toy_arch(tmp_path / arch, toy, weights=fused(toy_arch_weights(toy)))
        with open_model_file(path) as file:
            shares = measure_footprint(file.tensors.values(), None).formats
        found = {share.role: share.num_tensors for share in shares}
        assert found.get(Role.STATE, 0) == (7 if role is Role.STATE else 0), found
        assert found[Role.ATTENTION] == (3 if role is Role.STATE else 4), found
