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

# A CPU unpacks all weights once per chunk, which takes a few hundredths of the time of 1024 tokens, but a third of it where
# they become matrix tiles. A file that does not fit in memory is read once per chunk. On a GPU the time of a chunk hardly
# depends on its length, and what the GPU lacks is copied once per chunk.
_CHUNK_TOKENS: Final = 1024
_LONG_CHUNK_TOKENS: Final = 2048

# Logits of so many tokens take 0.3 GB with a vocabulary of 152,000. Where a chunk reads the file, or a device gets what it
# lacks, more of them cost less than more chunks.
_SCORED_TOKENS: Final = 512

# A second chunk in flight is computed while the first one waits for a disk, a device, workers or ranks. Where it waits for
# none, that wins a few hundredths at most, and a request that comes would wait for both.
_CHUNKS_BESIDE_WAITING: Final = 2
# Chunks in flight follow each other layer by layer, and find in memory what the first one had read. Each makes windows' caches
# larger, so that these models keep to the number above.
_CHUNKS_THAT_SHARE_READS: Final = 4


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """max_context_tokens: of prompt and answer of one request. chunk_tokens: the most of a prompt's chunk.
    max_prompt_chunks: of prompts in flight at a time. scored_tokens: the most of a chunk that need logits.

    why_context, why_chunk, why_chunks: the reasons, for the user.
    """

    max_context_tokens: int
    chunk_tokens: int
    max_prompt_chunks: int
    scored_tokens: int
    why_context: str
    why_chunk: str
    why_chunks: str


def served_context(asked: int | None, spec: ModelSpec) -> int:
    """Return the tokens of the longest sequence, prompt and answer: as asked for, or as many as come without."""
    return min(spec.context_length, _DEFAULT_MAX_CONTEXT_TOKENS) if asked is None else asked


def prompt_limits(
    config: EngineConfig,
    spec: ModelSpec,
    tensor_bytes: int,
    room_bytes: int,
    *,
    on_device: bool = False,
    on_tiles: bool = False,
) -> PromptLimits:
    """Return the config's limits, or the defaults. Raises ConfigError for too long a context.

    tensor_bytes: of the file; room_bytes: what memory can hold of it. on_device: whether some of the model is to be on a GPU.
    on_tiles: whether the CPU multiplies prompts on matrix tiles.
    """
    asked, why_context = config.memory.max_context_tokens, "asked for (--ctx)"
    context = served_context(asked, spec)
    if asked is None:
        why_context = (
            f"the model allows {spec.context_length}; more than {context} must be asked for (--ctx)"
        )
        if context == spec.context_length:
            why_context = "as many as the model was trained for"
    elif context > spec.context_length:
        raise ConfigError(
            f"--ctx is {context}, but the model was trained for {spec.context_length}: choose at most that"
        )
    waits = on_device or tensor_bytes > room_bytes
    chunk, why_chunk = config.scheduler.prefill_chunk_tokens, "asked for (--prefill-chunk)"
    scored = chunk
    if not chunk:
        chunk, why_chunk = _chunk(
            spec, tensor_bytes, room_bytes, on_device=on_device, on_tiles=on_tiles
        )
        scored = chunk if waits else min(chunk, _SCORED_TOKENS)
    chunks, why_chunks = config.scheduler.max_prompt_chunks, "asked for (--prompt-chunks)"
    if not chunks:
        shares_reads = tensor_bytes > room_bytes and not on_device and spec.window is None
        chunks, why_chunks = _chunks_in_flight(config, waits=waits, shares_reads=shares_reads)
    return PromptLimits(context, chunk, chunks, scored, why_context, why_chunk, why_chunks)


def _chunks_in_flight(config: EngineConfig, *, waits: bool, shares_reads: bool) -> tuple[int, str]:
    """Return the most chunks of prompts in flight, and why.

    waits: whether a chunk waits for a disk or a device. shares_reads: whether it waits for a disk, and memory has room for more.
    """
    is_divided = bool(config.remote.workers) or config.parallel.rank is not None
    if shares_reads and not is_divided:
        return _CHUNKS_THAT_SHARE_READS, "each layer is read once for all of them"
    if waits or is_divided:
        return (
            _CHUNKS_BESIDE_WAITING,
            "one is computed while another waits for what is not in memory here",
        )
    return 1, "a chunk hardly waits, and newcomers would wait for each"


def _chunk(
    spec: ModelSpec, tensor_bytes: int, room_bytes: int, *, on_device: bool, on_tiles: bool
) -> tuple[int, str]:
    """Return the most tokens of a prompt's chunk, and why."""
    if tensor_bytes > room_bytes:
        room = f"the file needs {format_bytes(tensor_bytes)} and memory has {format_bytes(room_bytes)} for it"
        return _LONG_CHUNK_TOKENS, f"{room}, so that each chunk reads it anew"
    if spec.latent is not None and spec.latent.expanded_tokens > 0:
        why = "each chunk makes keys and values of the whole context of latent attention"
        return _LONG_CHUNK_TOKENS, why
    if on_device:
        return _LONG_CHUNK_TOKENS, "a GPU takes hardly longer for it, and gets what it lacks once"
    if on_tiles:
        return _LONG_CHUNK_TOKENS, "each chunk makes matrix tiles of all weights"
    return _CHUNK_TOKENS, "the file fits in memory, and longer chunks are hardly faster"
