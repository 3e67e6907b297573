"""The planner: everything fits, what was asked for counts, and every choice has a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planning import on_device, plan_of, spare_of, wish_of
from thermocline.experts.placement.allocation import Wish
from thermocline.experts.placement.constraints import PlacementConstraints
from thermocline.experts.placement.planner import DeviceMemory, make_plan
from thermocline.kernels.cache_format import CacheType, HeadShape
from thermocline.kv.cache import KVCacheSpec
from thermocline.models.attention_specs import WindowSpec
from thermocline.models.device.sizes import measure_device_sizes
from thermocline.models.rope import RopeRule
from thermocline.models.router_rule import RouterRule
from thermocline.models.sizes import LayerSizes, ModelSizes, measure_sizes
from thermocline.models.spec import LayerKind, ModelSpec

GIB = 1 << 30
MIB = 1 << 20


def model(*layers: LayerSizes, experts: int = 8, used: int = 2) -> ModelSizes:
    return ModelSizes(layers, 10 * MIB, 20 * MIB, experts, used, hidden_size=64)


def layer(trunk: int = 30 * MIB, kv: int = 1024, expert: int = 5 * MIB, layout: str = "q4"):
    return LayerSizes(trunk, kv, expert, layout)


plan = plan_of


def toy_spec() -> ModelSpec:
    router = RouterRule(8, 2, normalize_top_k=True)
    return ModelSpec("qwen3moe", "toy", 2, 64, 4, 2, 16, 100, 512, 1e4, 1e-6, 32, router)


def test_without_a_device_everything_is_on_the_cpu():
    """Zero memory is a plan like any other."""
    sizes = model(layer(), layer())
    found = plan(sizes, 0)
    assert (found.trunk_layers_on_gpu, found.device_bytes, found.placement.num_hot) == (0, 0, 0)
    assert found.host_bytes == sizes.total + sizes.kv(1024)
    assert any("CPU" in reason for reason in found.reasons)


def test_non_expert_weights_are_there_whole_or_not_at_all():
    """A device that is one byte too small has none, with the number of missing bytes and the flags that help."""
    sizes = model(layer(), layer(), layer())
    needed = spare_of(sizes) + (20 + 3 * 31) * MIB
    whole = plan(sizes, needed + 12 * MIB)
    assert (whole.trunk_layers_on_gpu, whole.non_expert_bytes) == (3, 110 * MIB)
    assert whole.kv_bytes == 3 * MIB + on_device(sizes).padding
    # One slot for uploads, and one for an expert that stays.
    assert (whole.staging_bytes, whole.expert_budget_bytes) == (5 * MIB, 5 * MIB)
    none = plan(sizes, needed - 1)
    assert (none.trunk_layers_on_gpu, none.non_expert_bytes, none.kv_bytes) == (0, 0, 0)
    assert none.placement.num_hot > 0
    reason = next(reason for reason in none.reasons if "missing" in reason)
    for part in ("1 B are missing", "--ctx", "--kv-type q8_0", "--device-memory"):
        assert part in reason, part


def test_recurrent_states_take_the_same_whatever_the_context():
    """States of some sequences come before experts, beside the layer that moves them on."""
    recurrent = LayerSizes(30 * MIB, 0, 5 * MIB, "q4", state=3 * MIB)
    sizes = model(layer(), recurrent)
    found = plan(sizes, 4 * GIB, states=2)
    assert (found.kv_bytes, found.host_kv_bytes) == (7 * MIB + on_device(sizes).padding, 0)
    away = plan(sizes, 4 * GIB, non_expert=Wish.NO)
    assert (away.kv_bytes, away.host_kv_bytes) == (0, 4 * MIB)


def test_layers_without_a_cache_cost_none():
    """Keys and values are priced where there are any."""
    sizes = model(layer(kv=0), layer(kv=2048))
    assert plan(sizes, 4 * GIB).kv_bytes == 2 * MIB + 16 * 2048


def test_a_driver_that_calls_more_free_than_there_is_is_not_believed():
    """On unified memory free may exceed total: the total counts, and the plan says so."""
    sizes = model(layer())
    for total, free, usable in ((GIB, 3 * GIB, GIB), (GIB, -5, 0)):
        memory = DeviceMemory(total, free)
        odd = make_plan(sizes, on_device(sizes), memory, wish_of(memory.usable))
        assert odd.device_bytes_limit == usable
        assert ("counted as the latter" in odd.reasons[0]) == (free > total)
        assert (odd.device_bytes > 0) == (usable > 0)


def test_experts_go_by_their_use_per_byte_above_a_floor():
    """Two cool experts of a layer stay before the others' ninth best; then the hottest per byte follow."""
    sizes = model(layer(expert=4 * MIB), layer(expert=8 * MIB, layout="q8"))
    heat = [[1, 2, 3, 4, 5, 6, 7, 8], [80, 70, 60, 50, 40, 30, 20, 10]]
    spare = spare_of(sizes) + (20 + 2 * 31) * MIB
    # Of 76 MiB four slots of 8 are for uploads. Experts of two sizes never share a slot: 44 MiB are split by bytes.
    found = plan(sizes, spare + 76 * MIB, heat=heat)
    assert found.placement.hot == ((5, 6, 7), (0, 1, 2))
    assert found.slots == {"q4": 3, "q8": 3}
    assert "by their use so far; 2 or more of each layer" in " ".join(found.reasons)
    assert found.hot_share == pytest.approx((6 + 7 + 8 + 80 + 70 + 60) / (36 + 360))
    assert "58.3% of the choices so far fell on them" in found.reasons


def test_slots_are_counted_by_layout():
    """Experts of different formats never share a size."""
    sizes = model(layer(layout="q4"), layer(layout="q6", expert=6 * MIB))
    found = plan(sizes, 4 * GIB)
    assert found.slots == {"q4": 8, "q6": 8}
    assert found.reasons[-2:] == (
        "all experts on the device",
        "places by size: 8 of 5.00 MiB (q4); 8 of 6.00 MiB (q6)",
    )


def test_constraints_compose_and_never_exceed_the_device():
    """Asked for and possible is done; asked for and impossible gives way with a reason."""
    sizes = model(layer(), layer())
    constraints = PlacementConstraints(
        cpu_layers=1, hot=frozenset({(0, 3), (1, 7)}), cold=frozenset({(1, 0)})
    )
    found = plan(sizes, 4 * GIB, constraints=constraints)
    assert found.placement.hot == ((), (1, 2, 3, 4, 5, 6, 7))
    kept = "1 of 2 experts asked for stay on the CPU: something else that was asked for keeps them there"
    assert kept in found.reasons
    some = plan(
        sizes,
        4 * GIB,
        max_expert_bytes=31 * MIB,
        constraints=PlacementConstraints(hot=frozenset({(1, 7)})),
    )
    assert some.hot_expert_bytes == 15 * MIB
    assert 7 in some.placement.hot[1]
    much = plan(sizes, 950 * MIB, max_expert_bytes=100 * GIB)
    assert much.expert_budget_bytes < sizes.routed
    assert any("100.00 GiB asked for" in reason for reason in much.reasons)
    by_hand = plan(
        sizes, 4 * GIB, constraints=PlacementConstraints(hot=frozenset({(0, 3)}), only_hot=True)
    )
    assert by_hand.placement.hot == ((3,), ())
    assert "1 of 16 experts on the device, as asked for" in by_hand.reasons
    host = plan(sizes, 4 * GIB, non_expert=Wish.NO)
    assert (host.trunk_bytes, host.placement.num_hot) == (0, 16)


SIZES = st.builds(
    lambda layers, experts, used: ModelSizes(tuple(layers), 77, 99, experts, min(used, experts), 8),
    st.lists(
        st.builds(
            LayerSizes,
            st.integers(0, 50 * MIB),
            st.integers(0, 4096),
            st.sampled_from([0, 0, 3 * MIB, 5 * MIB]),
            st.sampled_from(["a", "b"]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 9),
    st.integers(1, 9),
)
KEYS = st.frozensets(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=6)
WISHES = st.builds(
    PlacementConstraints,
    st.integers(0, 4),
    KEYS,
    KEYS,
    st.booleans(),
)


@pytest.mark.slow
@given(
    SIZES, st.integers(0, 2 * GIB), st.integers(1, 50_000), WISHES, st.none() | st.integers(0, GIB)
)
def test_no_plan_exceeds_anything(sizes, vram, num_tokens, constraints, most):
    """Whatever is asked of whatever device: all of it fits, and every byte is somewhere, once."""
    constraints = replace(
        constraints, hot=frozenset(key for key in constraints.hot if key[0] < len(sizes.layers))
    )
    constraints = replace(
        constraints,
        cold=frozenset(
            key
            for key in constraints.cold
            if key[0] < len(sizes.layers) and key[1] < sizes.num_experts
        ),
    )
    found = plan(
        sizes,
        vram,
        num_tokens=num_tokens,
        constraints=constraints,
        max_expert_bytes=most,
        contexts=4,
    )
    placed = sum(
        len(hot) * of.expert for hot, of in zip(found.placement.hot, sizes.layers, strict=True)
    )
    assert placed == found.hot_expert_bytes <= found.expert_budget_bytes
    taken = found.device_bytes - found.hot_expert_bytes + found.expert_budget_bytes
    assert taken + found.workspace_bytes <= vram
    assert found.trunk_layers_on_gpu == len(found.device_layers)
    non_expert = sizes.non_expert_of(found.part)
    on_host = found.host_bytes - found.host_kv_bytes
    assert on_host + non_expert + placed == sizes.total
    assert not {(n, e) for n, hot in enumerate(found.placement.hot) for e in hot} & constraints.cold
    assert all(not hot for hot in found.placement.hot[: constraints.cpu_layers])
    assert sum(found.slots.values()) == found.placement.num_hot
    assert found.reasons


def test_layers_with_a_window_are_priced_by_what_they_keep():
    """All of a short sequence; of a long one the window and the chunks in flight, in whole blocks."""
    kinds = (LayerKind.ATTENTION, LayerKind.WINDOW, LayerKind.WINDOW)
    spec = replace(toy_spec(), num_layers=3, num_kv_heads=4, head_dim=128, own_layer_kinds=kinds)
    spec = replace(spec, window=WindowSpec(500, RopeRule(128, 1e4)))
    sizes = measure_sizes([], spec, CacheType.F16, in_flight_tokens=2 * 512)
    per_token = 2 * 4 * 128 * 2
    assert sizes.kv(400) == 3 * 400 * per_token
    kept = 528 + 1024
    assert sizes.kv(32768) == (32768 + 2 * kept) * per_token


def test_layers_with_heads_of_their_own_are_priced_by_them():
    """A layer with a window may have other heads than one without; on a device, too."""
    kinds = (LayerKind.ATTENTION, LayerKind.WINDOW)
    heads = (HeadShape(2, 512), HeadShape(8, 256))
    spec = replace(toy_spec(), num_layers=2, own_layer_kinds=kinds, own_kv_shapes=heads)
    spec = replace(spec, window=WindowSpec(64, RopeRule(256, 1e4)))
    sizes = measure_sizes([], spec, CacheType.F16)
    assert [layer.kv_per_token for layer in sizes.layers] == [2 * 2 * 512 * 2, 2 * 8 * 256 * 2]
    cache = KVCacheSpec(CacheType.F16, 16, 100, 100, 20, 1)
    on_device = measure_device_sizes([], spec, sizes, cache)
    assert (on_device.block, on_device.window_block) == (16 * 4096, 16 * 8192)
    assert (spec.at(0).head_dim, spec.at(1).num_kv_heads) == (512, 8)


def test_a_cache_of_eight_bits_takes_about_a_quarter():
    """Q8_0 holds 32 numbers in 34 bytes."""
    spec = replace(toy_spec(), num_layers=1, num_kv_heads=4, head_dim=128)
    by_type = {
        cache: measure_sizes([], spec, cache).kv(1000) for cache in (CacheType.F32, CacheType.Q8_0)
    }
    assert by_type[CacheType.Q8_0] / by_type[CacheType.F32] == 34 / 128
