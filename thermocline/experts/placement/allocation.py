"""The one rule that divides a device's memory, for `thermocline plan` and for the engine. Pure.

First the non-expert weights with one context of keys and values, then experts, then further contexts. Experts have
what of the cache is not used, besides (`lent_segments.py`). Which non-expert weights are on the device is a
`DevicePart`: what was asked for, or as many of the last layers as fit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from thermocline.errors import ConfigError, DeviceMemoryError
from thermocline.experts.placement.lent_segments import lend_segments
from thermocline.experts.placement.slots import UNIT_BYTES, first_within, plan_slots
from thermocline.experts.placement.upload_slots import MAX_STAGED, num_staged_slots
from thermocline.kernels.gpu.formats import DEVICE_FORMATS
from thermocline.models.device.part import DevicePart
from thermocline.units import align_up, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thermocline.experts.placement.constraints import PlacementConstraints
    from thermocline.experts.placement.lent_segments import LentSegments
    from thermocline.experts.placement.slots import LayoutSlots
    from thermocline.kv.cache import KVCacheSpec
    from thermocline.models.device.sizes import DeviceSizes

# What drivers, Triton, captured steps of every size of a batch, products, and splits of attention take besides. No part of
# it grows with the context.
_WORKSPACE_BYTES: Final = 768 << 20
# Float32 rows of the hidden width that a token of a chunk has at once: residual, norms, queries, outputs.
_ROWS_PER_TOKEN: Final = 12
# Sequences, snapshots, and rows of drafts, whose recurrent states come before experts; further ones come after them.
_FIRST_STATES: Final = 4
# Stands for no limit.
_ENDLESS: Final = 1 << 62


class Wish(Enum):
    """Whether a part is to be on the device: not at all, if it fits, or in any case."""

    NO = "no"
    IF_IT_FITS = "if it fits"
    YES = "yes"


@dataclass(frozen=True, slots=True)
class DeviceWish:
    """What is wanted of a device.

    limit_bytes: what may be taken of it, None without a limit. part: which non-expert weights `non_expert` is about,
    None for all, or for as many layers as fit. max_expert_bytes: of experts with their uploads. most_hot: experts of each
    layer that may stay, None for all. cache: what the config asks for. chunk_tokens: the most of a prompt's chunk.
    """

    limit_bytes: int | None
    non_expert: Wish
    experts: Wish
    cache: KVCacheSpec
    chunk_tokens: int
    constraints: PlacementConstraints
    max_expert_bytes: int | None = None
    most_hot: tuple[int, ...] | None = None
    part: DevicePart | None = None


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """How a device's memory is divided. Sizes in bytes.

    part: the non-expert weights that are there, with their layers' cache. kv_bytes: of that. workspace_bytes: left free for steps and the driver. staging_bytes: of `num_staged` slots for uploads.
    expert_bytes: for experts that stay. num_contexts: full contexts that the device's cache has room for.
    cache: its places, which are those of layers on the CPU too; without it, what the config asks for. reasons: what was
    decided and why, in order; refused: those of them why a part that was to be there is not. max_lent_bytes: of experts
    that may be in the cache's memory while it is not used; lent: where, None for nowhere. slot_bytes: of the experts that
    have slots always, once those are cut.
    """

    limit_bytes: int | None
    part: DevicePart
    non_expert_bytes: int
    kv_bytes: int
    workspace_bytes: int
    staging_bytes: int
    num_staged: int
    expert_bytes: int
    num_contexts: int
    cache: KVCacheSpec
    reasons: tuple[str, ...]
    refused: tuple[str, ...] = ()
    max_lent_bytes: int = 0
    lent: LentSegments | None = None
    slot_bytes: int = 0

    @property
    def has_non_expert(self) -> bool:
        """Whether some non-expert weights are on the device."""
        return not self.part.is_empty

    @property
    def has_experts(self) -> bool:
        """Whether experts may be on the device."""
        return self.num_staged > 0

    @property
    def lent_expert_bytes(self) -> int:
        """The bytes of the experts that are in the cache's memory while it is empty."""
        return 0 if self.lent is None else self.lent.expert_bytes

    @property
    def arena_start(self) -> int:
        """Where the cache begins in memory that experts and cache have in common, behind the experts' own."""
        return (self.staging_bytes + self.expert_bytes) // UNIT_BYTES * UNIT_BYTES

    def arena_bytes(self, sizes: DeviceSizes) -> int:
        """Return what experts and the keys and values of layers that keep all tokens take together. sizes: of the model."""
        block = _lendable_bytes(sizes.of(self.part), self.cache)
        return self.arena_start + (self.cache.num_blocks + 1) * block


def allocate(sizes: DeviceSizes, wish: DeviceWish) -> DeviceAllocation:
    """Return how the device is divided.

    Raises DeviceMemoryError, and ConfigError for experts that a device does not read, where a part that is wanted in any
    case does not fit.
    """
    limit = _ENDLESS if wish.limit_bytes is None else wish.limit_bytes
    # The workspace is there only with something to compute.
    workspace = min(limit, workspace_bytes(sizes, wish.chunk_tokens))
    room = limit - workspace
    part, reasons, refused = _place_non_expert(sizes, wish, room)
    has_non_expert, sizes = not part.is_empty, sizes.of(part)
    first = _first_cache(wish.cache)
    if has_non_expert:
        room -= _base_bytes(sizes, first)
    experts = _give_experts(sizes, wish, room)
    if wish.experts is Wish.IF_IT_FITS and not experts.num_staged:
        refused += experts.reasons
    reasons += experts.reasons
    cache = wish.cache
    if has_non_expert:
        cache = _grow(sizes, first, wish.cache, room - experts.staging - experts.resident)
        reasons += _about_contexts(sizes, cache, wish.cache)
    is_used = has_non_expert or experts.num_staged > 0
    # A fixed set of experts has nothing that could come and go.
    can_lend = has_non_expert and wish.most_hot is None and _lendable_bytes(sizes, cache) > 0
    return DeviceAllocation(
        limit_bytes=wish.limit_bytes,
        part=part,
        non_expert_bytes=_non_expert_bytes(sizes, cache) if has_non_expert else 0,
        kv_bytes=_kv_bytes(sizes, cache) if has_non_expert else 0,
        workspace_bytes=workspace if is_used else 0,
        staging_bytes=experts.staging,
        num_staged=experts.num_staged,
        expert_bytes=experts.resident,
        num_contexts=cache.num_blocks // cache.min_blocks if has_non_expert else 0,
        cache=cache,
        reasons=reasons,
        refused=refused,
        max_lent_bytes=experts.more if can_lend else 0,
    )


def lent_segments(
    sizes: DeviceSizes,
    allocation: DeviceAllocation,
    constraints: PlacementConstraints,
    slots: Mapping[str, LayoutSlots],
) -> LentSegments | None:
    """Return what of the cache's memory experts have while it is not used.

    sizes: of the whole model. slots: those that experts have always.
    """
    if not allocation.max_lent_bytes:
        return None
    return lend_segments(
        _lendable_bytes(sizes.of(allocation.part), allocation.cache),
        allocation.cache.num_blocks,
        slots,
        _allowed_by_layout(sizes, constraints),
        allocation.max_lent_bytes,
    )


def expert_slots(
    sizes: DeviceSizes,
    allocation: DeviceAllocation,
    constraints: PlacementConstraints,
    num_first: Mapping[str, int],
    *,
    only_first: bool = False,
) -> Mapping[str, LayoutSlots]:
    """Return the slots of each layout for experts that stay. num_first: of each layout's experts installed first.

    only_first: no others ever come.
    """
    budget, by_layout = allocation.expert_bytes, sizes.by_layout
    known = {layout: count for layout, count in num_first.items() if layout in by_layout}
    if only_first:
        wanted = sum(align_up(by_layout[name], UNIT_BYTES) * count for name, count in known.items())
        budget = min(budget, wanted)
    first = first_within(known, by_layout, budget)
    return plan_slots(by_layout, _allowed_by_layout(sizes, constraints), first, budget)


def workspace_bytes(sizes: DeviceSizes, chunk_tokens: int) -> int:
    """Return what a device keeps free for steps with chunks of so many tokens."""
    return _WORKSPACE_BYTES + 4 * _ROWS_PER_TOKEN * chunk_tokens * sizes.hidden_size


class _Placed(NamedTuple):
    """What of the non-expert weights is on the device, and why; refused: why not more of it."""

    part: DevicePart
    reasons: tuple[str, ...]
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _ExpertRoom:
    """more: bytes that experts would take besides."""

    resident: int
    staging: int
    num_staged: int
    reasons: tuple[str, ...]
    more: int = 0


def _first_cache(cache: KVCacheSpec) -> KVCacheSpec:
    """Return the cache that comes before experts: one context, and some sequences' states."""
    num_snapshots = min(cache.num_snapshots, _FIRST_STATES)
    num_live = min(cache.num_live_states, _FIRST_STATES)
    return replace(
        cache,
        num_blocks=cache.min_blocks,
        num_states=num_live + num_snapshots,
        num_snapshots=num_snapshots,
        num_draft_states=min(cache.num_draft_states, _FIRST_STATES),
    )


def _grow(sizes: DeviceSizes, first: KVCacheSpec, wanted: KVCacheSpec, room: int) -> KVCacheSpec:
    """Return the cache with as many more blocks, then states, as have room and are wanted."""
    more_blocks = wanted.num_blocks - first.num_blocks
    if sizes.block:
        more_blocks = min(more_blocks, max(room, 0) // sizes.block)
    room -= more_blocks * sizes.block
    if not sizes.state:
        return replace(wanted, num_blocks=first.num_blocks + more_blocks)
    free = max(room, 0) // sizes.state
    live = min(free, wanted.num_live_states - first.num_live_states)
    drafts = min(free - live, wanted.num_draft_states - first.num_draft_states)
    free -= live + drafts
    snapshots = min(free, wanted.num_snapshots - first.num_snapshots)
    return replace(
        first,
        num_blocks=first.num_blocks + more_blocks,
        num_states=first.num_states + live + snapshots,
        num_snapshots=first.num_snapshots + snapshots,
        num_draft_states=first.num_draft_states + drafts,
    )


def _non_expert_bytes(sizes: DeviceSizes, cache: KVCacheSpec) -> int:
    return sizes.non_expert + sizes.position * cache.min_blocks * cache.block_tokens


def _kv_bytes(sizes: DeviceSizes, cache: KVCacheSpec) -> int:
    blocks = cache.num_blocks * sizes.block + cache.window_blocks * sizes.window_block
    return blocks + cache.num_state_slots * sizes.state + sizes.padding


def _lendable_bytes(sizes: DeviceSizes, cache: KVCacheSpec) -> int:
    """Return the bytes of a block that experts may have: keys and values of layers that keep all tokens, no units."""
    if sizes.splits_blocks:
        return 0
    dims = 32  # of which Q8_0 has a unit
    return sizes.block * cache.type.number_bytes(dims) // cache.type.row_bytes(dims)


def _base_bytes(sizes: DeviceSizes, first: KVCacheSpec) -> int:
    """Return what non-expert weights take with the cache that comes before experts."""
    return _non_expert_bytes(sizes, first) + _kv_bytes(sizes, first)


def _place_non_expert(whole: DeviceSizes, wish: DeviceWish, room: int) -> _Placed:
    """Return what of the non-expert weights is on the device."""
    limit = _ENDLESS if wish.limit_bytes is None else wish.limit_bytes
    none = DevicePart(len(whole.layers))
    if wish.non_expert is Wish.NO or (limit <= 0 and wish.non_expert is not Wish.YES):
        why = "non-expert weights on the CPU: as asked for"
        return _Placed(none, (why,) if limit > 0 else ())
    if whole.cpu_only:
        refused = (f"non-expert weights on the CPU: no device computes {whole.cpu_only} yet",)
        return _Placed(none, refused, refused)
    part, first = wish.part or DevicePart.whole(len(whole.layers)), _first_cache(wish.cache)
    sizes = whole.of(part)
    missing = _base_bytes(sizes, first) - room
    if missing <= 0:
        return _Placed(part, (_about_part(part, sizes, first),))
    what = _in_words(part, sizes, first)
    fix = _context_fix(sizes, wish, -missing)
    if wish.non_expert is Wish.YES:
        count = _most_layers(whole, first, room)
        fewer = f"fewer layers (--gpu-layers {count}), " if count else ""
        raise DeviceMemoryError(what, missing, fix=f"{fix}, {fewer}or --trunk-device cpu")
    why = (
        f"the device has {format_bytes(limit)}, and {format_bytes(missing)} are missing for {what}; "
        f"what helps: {fix}"
    )
    count = 0
    if wish.part is None:
        count = _most_layers(whole, first, room - _upload_bytes(whole, wish))
    if count < 2:  # the head alone
        refused = (f"non-expert weights on the CPU: {why}",)
        return _Placed(none, refused, refused)
    some = DevicePart.last(len(whole.layers), count)
    num_left = len(whole.layers) - len(some.layers)
    refused = (f"non-expert weights of {num_left} layers on the CPU: {why}",)
    return _Placed(some, (_about_part(some, whole.of(some), first), *refused), refused)


def _upload_bytes(whole: DeviceSizes, wish: DeviceWish) -> int:
    """Return what experts need to have all slots for uploads, which prompts use."""
    if wish.experts is Wish.NO:
        return 0
    return min(_wanted_bytes(whole, wish), 2 * MAX_STAGED * max(whole.experts))


def _in_words(part: DevicePart, sizes: DeviceSizes, first: KVCacheSpec) -> str:
    tokens = first.min_blocks * first.block_tokens
    return (
        f"{part} ({format_bytes(_non_expert_bytes(sizes, first))}) and a cache of {tokens} tokens "
        f"({format_bytes(_kv_bytes(sizes, first))})"
    )


def _about_part(part: DevicePart, sizes: DeviceSizes, first: KVCacheSpec) -> str:
    weights, kv = _non_expert_bytes(sizes, first), _kv_bytes(sizes, first)
    return (
        f"{part} on the device: {format_bytes(weights)}, and {format_bytes(kv)} for the first cache of "
        f"{first.min_blocks * first.block_tokens} tokens"
    )


def _most_layers(whole: DeviceSizes, first: KVCacheSpec, room: int) -> int:
    """Return how many of the last layers, the head first, fit into `room` bytes with their cache."""
    num_layers = len(whole.layers)
    return next(
        (
            count
            for count in range(num_layers + 1, 0, -1)
            if _base_bytes(whole.of(DevicePart.last(num_layers, count)), first) <= room
        ),
        0,
    )


def _context_fix(sizes: DeviceSizes, wish: DeviceWish, left: int) -> str:
    """Return the flags that help where `-left` bytes are missing for the first context."""
    cache, fixes = wish.cache, []
    per_token = sizes.block / cache.block_tokens + sizes.position
    most = int(cache.min_blocks * cache.block_tokens + left / per_token) if per_token else 0
    most = most // cache.block_tokens * cache.block_tokens
    if most > 0:
        fixes.append(f"a context of at most {most} tokens (--ctx)")
    if cache.type.name != "Q8_0":
        fixes.append("a smaller cache (--kv-type q8_0)")
    fixes.append("more of the device (--device-memory)")
    if sizes.state:
        fixes.append("fewer requests (--max-requests)")
    return ", ".join(fixes)


def _allowed_by_layout(sizes: DeviceSizes, constraints: PlacementConstraints) -> Mapping[str, int]:
    """Return how many experts of each layout a device reads and constraints let it have."""
    found = Counter(dict.fromkeys(sizes.by_layout, 0))
    for layer, count in enumerate(_experts_by_layer(sizes, constraints)):
        if count:
            found[sizes.layouts[layer]] += count
    return found


def _experts_by_layer(sizes: DeviceSizes, constraints: PlacementConstraints) -> list[int]:
    """Return how many experts of each layer a device reads and constraints let it have."""
    away = constraints.kept_away(len(sizes.experts), sizes.num_experts).sum(axis=1).tolist()
    return [
        sizes.num_experts - kept if nbytes else 0
        for nbytes, kept in zip(sizes.experts, away, strict=True)
    ]


def _wanted_bytes(sizes: DeviceSizes, wish: DeviceWish) -> int:
    """Return the bytes of all slots that wish and constraints have a use for."""
    allowed = _allowed_by_layout(sizes, wish.constraints)
    every = sum(align_up(sizes.by_layout[name], UNIT_BYTES) * n for name, n in allowed.items())
    if wish.most_hot is None:
        return every
    some = sum(
        align_up(nbytes, UNIT_BYTES) * most
        for nbytes, most in zip(sizes.experts, wish.most_hot, strict=True)
    )
    return min(every, some)


def _give_experts(sizes: DeviceSizes, wish: DeviceWish, room: int) -> _ExpertRoom:
    """Give experts what is left beside the first context; slots for uploads are a part of it."""
    wanted = _wanted_bytes(sizes, wish)
    why = _why_no_experts(sizes, wish, wanted)
    if why is not None:
        return _ExpertRoom(0, 0, 0, (f"experts on the CPU: {why}",) if room > 0 else ())
    largest = align_up(max(sizes.experts), UNIT_BYTES)
    given = room if wish.max_expert_bytes is None else min(room, wish.max_expert_bytes)
    if given < largest:
        fix = (
            "a smaller context (--ctx, --kv-type q8_0), more memory for experts (--expert-budget, --device-memory), "
            "or --hot-device none"
        )
        missing = largest - max(given, 0)
        if wish.experts is Wish.YES:
            raise DeviceMemoryError("an expert", missing, fix=fix)
        reason = (
            f"experts on the CPU: {format_bytes(missing)} are missing for one; what helps: {fix}"
        )
        return _ExpertRoom(0, 0, 0, (reason,) if room > 0 else ())
    layers = _experts_by_layer(sizes, wish.constraints)
    per_layer = 0 if wish.most_hot is not None else max(layers)
    num_staged = num_staged_slots(given, largest, wanted, per_layer)
    staging = num_staged * largest
    resident = min(given - staging, wanted)
    asked = wish.max_expert_bytes
    why = f"experts have {format_bytes(resident)}, of {format_bytes(wanted)} that could be there"
    if asked is not None and resident < wanted:
        how = "as asked for" if asked <= room else f"{format_bytes(asked)} asked for"
        why += f" (--expert-budget: {how})"
    reasons = (why, _about_uploads(num_staged, staging), *_about_unread(sizes))
    more = wanted if asked is None else min(wanted, asked - staging)
    return _ExpertRoom(resident, staging, num_staged, reasons, more - resident)


def _about_uploads(num_staged: int, staging: int) -> str:
    """Return what the slots for uploads are for."""
    what = f"uploads have {format_bytes(staging)}: {num_staged} slots"
    if num_staged <= MAX_STAGED:
        return what
    return f"{what}, half of them for experts of the layer behind that which is computed"


def _about_unread(sizes: DeviceSizes) -> tuple[str, ...]:
    """Return a reason where some layers' experts can not be on the device."""
    unread = sum(
        bool(layout) and not n for layout, n in zip(sizes.layouts, sizes.experts, strict=True)
    )
    if not unread:
        return ()
    return (
        f"experts of {unread} layers on the CPU: a GPU computes with {', '.join(sorted(DEVICE_FORMATS))}",
    )


def _why_no_experts(sizes: DeviceSizes, wish: DeviceWish, wanted: int) -> str | None:
    """Return why no experts are to be on the device, None where some are."""
    if not sizes.num_experts:
        return "the model has none"
    if wish.experts is Wish.NO:
        return "as asked for"
    if not any(sizes.experts):
        why = f"no layer's experts are of formats that a GPU computes with ({', '.join(sorted(DEVICE_FORMATS))})"
        if wish.experts is Wish.YES:
            raise ConfigError(f"{why}: leave them to the CPU (--hot-device none)")
        return why
    return None if wanted else "all are kept there, as asked for"


def _about_contexts(sizes: DeviceSizes, cache: KVCacheSpec, wanted: KVCacheSpec) -> tuple[str, ...]:
    found = []
    tokens = cache.num_blocks * cache.block_tokens
    full, most = cache.num_blocks // cache.min_blocks, wanted.num_blocks // wanted.min_blocks
    if sizes.block:
        more = "" if full >= most else "; further requests wait for blocks"
        found.append(f"cache on the device: {tokens} tokens, {full} of {most} full contexts{more}")
    if sizes.state:
        more = (
            "" if cache.num_states == wanted.num_states else "; further requests wait for a state"
        )
        found.append(
            f"recurrent states on the device: of {cache.num_live_states} sequences and {cache.num_snapshots} "
            f"snapshots, of {wanted.num_live_states} and {wanted.num_snapshots}{more}; "
            f"{cache.num_draft_states} copies for drafted rows"
        )
    return tuple(found)
