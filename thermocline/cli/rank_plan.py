"""What `thermocline plan --ep` shows: the experts of each rank, and the workspace that ranks exchange with, term by term."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from thermocline.errors import ConfigError
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.config import EngineConfig
    from thermocline.models.prompt_limits import PromptLimits
    from thermocline.models.sizes import ModelSizes
    from thermocline.models.spec import ModelSpec
    from thermocline.parallel.workspace import Traffic

_FORM: Final = re.compile(r"(\d+)(?:x(\d+))?")


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What each of several ranks has. buffers: bytes by name, of one chunk in flight; expert_bytes: of the largest share."""

    dp: int
    tp: int
    traffic: Traffic
    buffers: dict[str, int]
    expert_bytes: int
    expert_map: str
    """Which experts each rank owns, in words."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all buffers of a rank."""
        return sum(self.buffers.values()) * self.traffic.num_layers_in_flight

    def as_dict(self) -> dict[str, object]:
        """Return all terms, for JSON."""
        traffic = self.traffic
        return asdict(self) | {
            "token_capacity": traffic.token_capacity(),
            "pair_capacity": traffic.pair_capacity(),
            "workspace_bytes": self.workspace_bytes,
        }

    def lines(self) -> tuple[str, ...]:
        """Return the terms for people."""
        traffic, slots = self.traffic, self.traffic
        experts_per_token = min(slots.num_experts_used, slots.num_owned)
        buffers = " + ".join(f"{name} {format_bytes(size)}" for name, size in self.buffers.items())
        return (
            f"{self.dp} x {self.tp} ranks: each owns up to {traffic.num_owned} experts of a layer, "
            f"{format_bytes(self.expert_bytes)} of the file",
            f"experts: {self.expert_map}",
            f"tokens that can arrive at a rank: {traffic.dispatchers} that dispatch x {traffic.tokens_each} tokens = "
            f"{traffic.token_capacity()}",
            f"outputs: {traffic.token_capacity()} tokens x {experts_per_token} experts = {traffic.pair_capacity()}, "
            f"of {traffic.hidden} numbers of {traffic.item_bytes} bytes",
            f"workspace of a rank: {traffic.num_layers_in_flight} chunks in flight x ({buffers}) = "
            f"{format_bytes(self.workspace_bytes)}",
        )


def plan_ranks(
    ranks: str,
    config: EngineConfig,
    spec: ModelSpec,
    sizes: ModelSizes,
    limits: PromptLimits,
    heat: Sequence[Sequence[float]] | None,
) -> RankPlan:
    """Return the plan of as many ranks. ranks: DP or DPxTP; heat: the known use, [layers][experts]. Raises ConfigError."""
    import numpy as np

    from thermocline.engine.mesh_builder import largest_chunk
    from thermocline.kernels.cache_format import CacheType
    from thermocline.parallel.map_choice import choose_map
    from thermocline.parallel.mesh import make_mesh
    from thermocline.parallel.parts import mixed_row_bytes
    from thermocline.parallel.rank import MeshPlan
    from thermocline.parallel.takeover import owned_counts
    from thermocline.parallel.workspace import arena_sizes
    from thermocline.remote.payload import ITEM_BYTES, PayloadType

    match = _FORM.fullmatch(ranks)
    if match is None or "0" in match.groups():
        raise ConfigError(f"--ep is {ranks!r}; write DP or DPxTP, such as 2 or 2x2")
    if not spec.has_experts:
        raise ConfigError(
            "the model has no routed experts, which are what ranks share: leave out --ep"
        )
    dp, tp = int(match[1]), int(match[2] or 1)
    mesh, num_experts = make_mesh(dp * tp, dp, tp), spec.router.num_experts
    parallel = config.parallel
    warmth = None if heat is None else np.array(heat, np.float64)
    experts, reason = choose_map(
        parallel.expert_map, (spec.num_layers, num_experts), mesh.size, warmth
    )
    plan = MeshPlan(
        mesh,
        experts,
        parallel.exchange,
        largest_chunk(config, spec, limits),
        spec.router.num_experts_used,
        mixed_row_bytes=mixed_row_bytes(spec, CacheType[config.memory.kv_type.upper()]),
    )
    num_owned = max(int(owned_counts(experts, place).max()) for place in range(mesh.size))
    item_bytes = ITEM_BYTES[PayloadType[parallel.payload.upper()]]
    traffic = plan.traffic(mesh, num_owned, spec.expert_hidden_size, item_bytes)
    expert_bytes = sum(layer.expert * num_owned for layer in sizes.layers)
    return RankPlan(dp, tp, traffic, arena_sizes(traffic, num_experts), expert_bytes, reason)
