"""The rule that divides a device's memory: its order, its limits, and what it says where something does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.planning import on_device, spare_of, wish_of
from thermocline.errors import ConfigError, DeviceMemoryError
from thermocline.experts.placement.allocation import DeviceAllocation, Wish, allocate
from thermocline.experts.placement.constraints import PlacementConstraints
from thermocline.models.device.part import DevicePart
from thermocline.models.sizes import LayerSizes, ModelSizes

MIB = 1 << 20
# 20 MiB of head and two layers of 30; a token caches 2 KiB; 16 experts of 4 MiB.
SIZES = ModelSizes((LayerSizes(30 * MIB, 1024, 4 * MIB, "q4"),) * 2, 10 * MIB, 20 * MIB, 8, 2, 64)
SPARE = spare_of(SIZES) + 80 * MIB
"""Workspace, a block of padding and non-expert weights."""


def test_one_context_then_experts_then_more_contexts():
    """Of a growing device experts get all beside the first context, until all are there; then contexts follow."""
    sizes = on_device(SIZES)

    def rooms(vram: int) -> tuple[int, int, int]:
        found = allocate(sizes, wish_of(vram, contexts=4))
        assert found.workspace_bytes + found.non_expert_bytes == SPARE - sizes.padding
        assert found.kv_bytes == (found.cache.num_blocks + 1) * sizes.block
        return found.num_contexts, found.num_staged, found.expert_bytes // MIB

    # A context is 2 MiB. Uploads take at most half, and sixteen slots.
    assert rooms(SPARE + 2 * MIB + 8 * MIB) == (1, 1, 4)
    assert rooms(SPARE + 2 * MIB + 32 * MIB) == (1, 4, 16)
    assert rooms(SPARE + 2 * MIB + 127 * MIB) == (2, 15, 64)
    assert rooms(SPARE + 2 * MIB + 128 * MIB) == (1, 16, 64)
    assert rooms(SPARE + 2 * MIB + 132 * MIB) == (3, 16, 64)
    assert rooms(SPARE + (1 << 30)) == (4, 16, 64)


def test_uploads_have_as_many_slots_as_a_layer_lacks():
    """Half of a layer's experts missing: half as many slots; an eighth of the bytes at most, and never for a fixed set."""
    model = replace(
        SIZES, layers=(replace(SIZES.layers[0], expert=64 << 10),) * 12, num_experts=128
    )
    sizes = on_device(model)
    first = spare_of(model) + (12 * 30 + 20 + 12) * MIB

    def slots(room: int, **wish) -> tuple[int, int]:
        found = allocate(sizes, wish_of(first + room, **wish))
        assert found.staging_bytes == found.num_staged * (64 << 10)
        if found.expert_bytes < 96 * MIB:
            assert found.staging_bytes + found.expert_bytes == room
        return found.num_staged, found.expert_bytes // MIB

    assert slots(49 * MIB) == (64, 45)
    assert slots(25 * MIB) == (50, 21), "an eighth"
    assert slots(73 * MIB) == (32, 71)
    assert slots(98 * MIB) == (16, 96)
    fixed, _ = slots(49 * MIB, most_hot=(128,) * 12)
    assert fixed == 16
    away = PlacementConstraints(cpu_layers=6)
    assert slots(49 * MIB, constraints=away) == (16, 48), "what is left has room"
    assert "half of them" in " ".join(allocate(sizes, wish_of(first + 49 * MIB)).reasons)


def test_a_device_without_a_limit_has_everything():
    """All contexts and all experts, but for what was asked for."""
    found = allocate(on_device(SIZES), wish_of(None, contexts=4))
    assert (found.num_contexts, found.expert_bytes) == (4, 64 * MIB)
    less = allocate(on_device(SIZES), wish_of(None, contexts=4, max_expert_bytes=16 * MIB))
    assert (less.num_staged, less.expert_bytes) == (2, 8 * MIB)
    some = allocate(on_device(SIZES), wish_of(None, most_hot=(3, 0)))
    assert some.expert_bytes == 12 * MIB


def test_states_of_some_sequences_come_before_experts():
    """Four sequences and four snapshots first, then experts, contexts, and states as there is room."""
    recurrent = replace(SIZES.layers[0], kv_per_token=0, state=MIB)
    model = replace(SIZES, layers=(SIZES.layers[0], recurrent))
    sizes = on_device(model)

    def states(vram: int) -> tuple[int, int]:
        found = allocate(sizes, wish_of(vram, states=20, snapshots=8)).cache
        return found.num_live_states, found.num_snapshots

    full = spare_of(model) + (80 + 1 + 8 + 128) * MIB
    assert states(full - 100 * MIB) == (4, 4)
    assert states(full + 10 * MIB) == (14, 4)
    assert states(full + 18 * MIB) == (20, 6)
    assert states(full + 1000 * MIB) == (20, 8)


def test_what_was_asked_for_and_does_not_fit_is_an_error():
    """With the number of missing bytes, and the flags that help; by default it is a reason."""
    sizes, vram = on_device(SIZES), SPARE + MIB
    with pytest.raises(
        DeviceMemoryError, match=r"at most 512 tokens \(--ctx\).*q8_0.*--trunk-device cpu"
    ) as caught:
        allocate(sizes, wish_of(vram, non_expert=Wish.YES))
    assert caught.value.missing_bytes == MIB
    found = allocate(sizes, wish_of(vram))
    assert not found.has_non_expert
    assert found.cache == wish_of(vram).cache
    assert "1.00 MiB are missing" in found.refused[0]
    with pytest.raises(
        DeviceMemoryError, match=r"no room for an expert.*--hot-device none"
    ) as caught:
        allocate(sizes, wish_of(vram + MIB + 1, experts=Wish.YES))
    assert caught.value.missing_bytes == 4 * MIB - 1
    alone = allocate(sizes, wish_of(vram + MIB + 1))
    assert (alone.has_non_expert, alone.has_experts) == (True, False)
    assert "missing for one" in alone.refused[0]


def test_layers_that_were_asked_for_take_what_they_take():
    """Their weights and their part of the cache; what others would have taken is for experts."""
    sizes = on_device(SIZES)
    whole = allocate(sizes, wish_of(SPARE + 20 * MIB))
    part = DevicePart.last(2, 2)
    found = allocate(sizes, wish_of(SPARE + 20 * MIB, part=part, non_expert=Wish.YES))
    assert (found.part, found.has_non_expert) == (part, True)
    assert found.non_expert_bytes == 50 * MIB == whole.non_expert_bytes - 30 * MIB
    assert found.kv_bytes == whole.kv_bytes // 2 == MIB + 16 * 1024
    gained = found.expert_bytes + found.staging_bytes - whole.expert_bytes - whole.staging_bytes
    assert gained == 30 * MIB + MIB + 16 * 1024
    head = allocate(sizes, wish_of(SPARE, part=DevicePart.last(2, 1)))
    assert (head.non_expert_bytes, head.kv_bytes) == (20 * MIB, 0)
    assert head.cache == wish_of(SPARE).cache
    assert "the head on the device" in head.reasons[0]


def test_the_number_of_layers_that_an_error_names_fits():
    """One more does not."""
    sizes = on_device(SIZES)
    for vram, count in ((SPARE - 28 * MIB, 2), (SPARE - 60 * MIB, 1)):

        def asked(part: DevicePart | None, vram: int = vram) -> DeviceAllocation:
            return allocate(sizes, wish_of(vram, part=part, non_expert=Wish.YES, experts=Wish.NO))

        with pytest.raises(DeviceMemoryError, match=rf"fewer layers \(--gpu-layers {count}\)"):
            asked(None)
        assert asked(DevicePart.last(2, count)).part.layers == (1,)[: count - 1]
        with pytest.raises(DeviceMemoryError):
            asked(DevicePart.last(2, count + 1))


def test_by_default_as_many_layers_as_fit():
    """The last ones, beside slots for uploads; a reason says what is missing. Less than a layer stays on the CPU."""
    small = on_device(SIZES)
    sizes = replace(small, layers=(replace(small.layers[0], non_expert=1 << 30), small.layers[1]))

    def layers(vram: int, **rest) -> tuple[int, ...]:
        found = allocate(sizes, wish_of(vram, **rest))
        is_short = any("missing for the whole trunk" in each for each in found.refused)
        assert is_short != found.part.is_whole
        return found.part.layers

    # Head, one layer and its context; room for all 16 experts, of which uploads may have half.
    half, uploads = SPARE - 30 * MIB + 2 * MIB, 64 * MIB
    assert layers(half + uploads) == (1,)
    assert allocate(sizes, wish_of(half + uploads)).num_staged == 8
    assert layers(half + uploads - 3 * MIB) == ()
    assert layers(half, experts=Wish.NO) == (1,)
    assert layers(half, constraints=PlacementConstraints(cpu_layers=2)) == (1,)
    assert layers(SPARE + 2 * MIB + (1 << 30) - 30 * MIB) == (0, 1)
    with pytest.raises(DeviceMemoryError, match="--gpu-layers 2"):
        layers(half + uploads, non_expert=Wish.YES)


def test_experts_that_no_kernel_reads_take_nothing():
    """They are refused where they were asked for, and leave the room to contexts otherwise."""
    sizes = replace(on_device(SIZES), experts=(0, 0))
    with pytest.raises(ConfigError, match="--hot-device none"):
        allocate(sizes, wish_of(1 << 30, experts=Wish.YES))
    found = allocate(sizes, wish_of(SPARE + 8 * MIB, contexts=4))
    assert (found.num_contexts, found.staging_bytes, found.expert_bytes) == (4, 0, 0)
    half = replace(on_device(SIZES), experts=(4 * MIB, 0))
    some = allocate(half, wish_of(1 << 30))
    assert some.expert_bytes == 32 * MIB
    assert any("experts of 1 layers on the CPU" in reason for reason in some.reasons)


def test_experts_that_are_kept_away_take_nothing():
    """--cpu-moe in so many words: all layers' experts stay on the CPU, and uploads need no slots."""
    away = PlacementConstraints(cpu_layers=2)
    found = allocate(on_device(SIZES), wish_of(1 << 30, constraints=away, experts=Wish.YES))
    assert (found.num_staged, found.expert_bytes) == (0, 0)
    assert any("as asked for" in reason for reason in found.reasons)
