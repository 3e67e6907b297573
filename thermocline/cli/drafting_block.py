"""What `thermocline plan` says of the block in a model file that drafts tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from thermocline.config import EngineConfig
    from thermocline.kv.cache import KVCacheSpec
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DraftingBlock:
    """What the block that drafts takes of the host. cache_bytes: for a full context."""

    weight_bytes: int
    cache_bytes: int

    def lines(self) -> tuple[str, ...]:
        """Return what there is to say."""
        from thermocline.units import format_bytes

        weights, cache = format_bytes(self.weight_bytes), format_bytes(self.cache_bytes)
        return (
            f"the block that drafts takes {weights} of the host, and {cache} for a full context "
            "(--speculate off leaves it out)",
        )


def drafting_block(
    config: EngineConfig, file: ModelFile, spec: ModelSpec, cache: KVCacheSpec
) -> DraftingBlock | None:
    """Return what the file's own drafter takes; None where it has none, or another was asked for."""
    from thermocline.models.registry import can_draft
    from thermocline.models.sizes import measure_next_block
    from thermocline.speculation.contract import drafter_names

    try:
        names = drafter_names(config.speculation.drafters)
    except ValueError as error:
        raise ConfigError(f"--speculate: {error}") from error
    if not can_draft(file, spec) or (names is not None and "mtp" not in names):
        return None
    found = measure_next_block(file.tensors.values(), spec, cache.type, cache.block_tokens)
    return DraftingBlock(found.weights, cache.min_blocks * found.cache_block)
