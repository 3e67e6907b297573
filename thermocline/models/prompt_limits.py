"""How many tokens a request may have, and a chunk of its prompt. Pure: decided by model, config and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.errors import ConfigError
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from thermocline.config import EngineConfig
    from thermocline.models.spec import ModelSpec

# A context that nobody asked for should not reserve tens of gigabytes of address space.
_DEFAULT_MAX_CONTEXT_TOKENS: Final = 32768

# Longer chunks hardly compute faster, but a file that does not fit in memory is read once per chunk.
_CHUNK_TOKENS: Final = 512
_CHUNK_TOKENS_OF_LARGE_FILES: Final = 2048


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """max_context_tokens: of prompt and answer of one request. chunk_tokens: the most of a prompt's chunk.

    why_context, why_chunk: the reasons, for the user.
    """

    max_context_tokens: int
    chunk_tokens: int
    why_context: str
    why_chunk: str


def prompt_limits(
    config: EngineConfig, spec: ModelSpec, tensor_bytes: int, room_bytes: int
) -> PromptLimits:
    """Return the config's limits, or the defaults. Raises ConfigError for too long a context.

    tensor_bytes: of the file; room_bytes: what memory can hold of it.
    """
    context, why_context = config.memory.max_context_tokens, "asked for (--ctx)"
    if context is None:
        context = min(spec.context_length, _DEFAULT_MAX_CONTEXT_TOKENS)
        why_context = (
            f"the model allows {spec.context_length}; more than {context} must be asked for (--ctx)"
        )
        if context == spec.context_length:
            why_context = "as many as the model was trained for"
    elif context > spec.context_length:
        raise ConfigError(
            f"--ctx is {context}, but the model was trained for {spec.context_length}: choose at most that"
        )
    chunk, why_chunk = config.scheduler.prefill_chunk_tokens, "asked for (--prefill-chunk)"
    if not chunk:
        fits = tensor_bytes <= room_bytes
        is_latent = spec.latent is not None and spec.latent.expanded_tokens > 0
        chunk = _CHUNK_TOKENS if fits and not is_latent else _CHUNK_TOKENS_OF_LARGE_FILES
        why_chunk = (
            "the file fits in memory, and longer chunks are hardly faster"
            if fits and not is_latent
            else "each chunk makes keys and values of the whole context of latent attention"
            if fits
            else f"the file needs {format_bytes(tensor_bytes)} and memory has {format_bytes(room_bytes)} for it, so "
            "that each chunk reads it anew"
        )
    return PromptLimits(context, chunk, why_context, why_chunk)
