"""What `thermocline plan` says of what drafts tokens: a block in the model's file, a file of its own, copies of states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from thermocline.config import EngineConfig
    from thermocline.kv.cache import KVCacheSpec
    from thermocline.messages import LayerIndex
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DrafterBytes:
    """What one drafter takes of the host. cache_bytes: for a full context; 0 where it has no cache of its own."""

    weight_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both."""
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True)
class DraftingCost:
    """What drafting takes of the host.

    block: the block in the model's file; None without one. file: the draft model's; None without one. state_bytes: copies
    of recurrent state that steps with drafts need, at most num_states, in the layers `recurrent`.
    """

    block: DrafterBytes | None = None
    file: DrafterBytes | None = None
    state_bytes: int = 0
    num_states: int = 0
    recurrent: tuple[LayerIndex, ...] = ()

    def beside(self, on_device: Collection[int]) -> DraftingCost:
        """Return what is left for the host where these layers are on a device: its plan counts their states."""
        here = tuple(layer for layer in self.recurrent if layer not in on_device)
        if len(here) == len(self.recurrent):
            return self
        state_bytes = self.state_bytes * len(here) // len(self.recurrent)
        return replace(self, state_bytes=state_bytes, recurrent=here)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.state_bytes + sum(
            each.total_bytes for each in (self.block, self.file) if each is not None
        )

    def described(self) -> dict[str, Any]:
        """Return it by names, for JSON."""
        from dataclasses import asdict

        return {
            "next_token_block": self.block and asdict(self.block),
            "draft_model": self.file and asdict(self.file),
            "draft_states_bytes": self.state_bytes,
        }

    def lines(self) -> list[str]:
        """Return what there is to say."""
        from thermocline.units import format_bytes

        found = []
        for each, what in (
            (self.block, "drafting by the file's own blocks"),
            (self.file, "the draft model"),
        ):
            if each is not None:
                weights, cache = format_bytes(each.weight_bytes), format_bytes(each.cache_bytes)
                context = f"{cache} for" if each.cache_bytes else "nothing more for"
                found.append(
                    f"{what} takes {weights} of the host, and {context} a full context "
                    "(--speculate off leaves it out)"
                )
        if self.state_bytes:
            found.append(
                f"steps with drafts keep up to {self.num_states} copies of recurrent state, "
                f"{format_bytes(self.state_bytes)} (--speculate off needs none)"
            )
        return found


def drafting_cost(
    config: EngineConfig, file: ModelFile, spec: ModelSpec, cache: KVCacheSpec
) -> DraftingCost:
    """Return what the drafters take that the config asks for. Raises ConfigError, and ModelError of the draft model."""
    from thermocline.speculation.contract import drafter_names

    try:
        names = drafter_names(config.speculation.drafters)
    except ValueError as error:
        raise ConfigError(f"--speculate: {error}") from error
    if names == ():
        return DraftingCost()
    num_states = cache.num_draft_states
    return DraftingCost(
        _own_block(file, spec, cache) if names is None or "mtp" in names else None,
        _of_file(config, file, spec, cache),
        num_states * spec.sequence_state_bytes,
        num_states,
        spec.layers_with_states,
    )


def _own_block(file: ModelFile, spec: ModelSpec, cache: KVCacheSpec) -> DrafterBytes | None:
    from thermocline.models.registry import can_draft
    from thermocline.models.sizes import measure_next_block

    if not can_draft(file, spec):
        return None
    found = measure_next_block(file.tensors.values(), spec, cache.type, cache.block_tokens)
    return DrafterBytes(found.weights, cache.min_blocks * found.cache_block)


def _of_file(
    config: EngineConfig, file: ModelFile, spec: ModelSpec, cache: KVCacheSpec
) -> DrafterBytes | None:
    from thermocline.kernels.cache_format import fitting_type
    from thermocline.modelfile.reader import open_model_file
    from thermocline.models.dflash import is_dflash, read_dflash_spec
    from thermocline.models.draft_model import read_draft_spec
    from thermocline.models.eagle3 import is_eagle3, read_eagle3_spec
    from thermocline.models.gemma4_assistant import is_assistant, read_assistant_spec

    path = config.speculation.draft_model
    if path is None:
        return None
    with open_model_file(path) as own:
        if is_assistant(own):
            read_assistant_spec(own, file, spec)
            return DrafterBytes(own.total_tensor_bytes, 0)
        state_bytes = 0
        if is_eagle3(own):
            eagle3 = read_eagle3_spec(own, file, spec)
            # Each block's end has a state besides.
            shapes, state_bytes = eagle3.kv_shapes, 4 * eagle3.decoder.hidden_size
        elif is_dflash(own):
            shapes = read_dflash_spec(own, file, spec).kv_shapes
        else:
            shapes = read_draft_spec(own, file).kv_shapes
        cache_type = fitting_type(cache.type, shapes)
        token_bytes = sum(shape.token_bytes(cache_type) for shape in shapes)
        block_bytes = cache.block_tokens * token_bytes + state_bytes
        return DrafterBytes(own.total_tensor_bytes, cache.min_blocks * block_bytes)
