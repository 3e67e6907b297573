"""What the cache holds of one sequence's beginning, as records. Pure: owns no block and no bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """The tokens of a sequence, and what decides about their blocks' keys.

    root: parent of the first key. num_prompt_tokens: the others were decoded. num_expanded: first tokens that were
    computed with the expanded form of latent attention.
    """

    token_ids: tuple[int, ...]
    root: bytes
    num_prompt_tokens: int
    num_expanded: int = 0


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """Which parts of a sequence's first blocks there are.

    num_blocks: in layers that keep all tokens. windows: indices of those that layers with a sliding window have.
    states: indices of blocks behind whose last token there is a snapshot of recurrent layers.
    """

    num_blocks: int
    windows: tuple[int, ...] = ()
    states: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """Places of a sequence's parts, which stay what they are until the prefix is given back.

    keys: of the first blocks. blocks: in order. windows, states: by the index of the block. new_*: those of them, as
    indices, that are to be written first.
    """

    tokens: SequenceTokens
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    windows: dict[int, int]
    states: dict[int, int]
    new_blocks: frozenset[int] = frozenset()
    new_windows: frozenset[int] = frozenset()
    new_states: frozenset[int] = frozenset()

    def has(self, parts: PrefixParts) -> bool:
        """Whether there is a place for each of these parts."""
        return (
            len(self.blocks) >= parts.num_blocks
            and self.windows.keys() >= set(parts.windows)
            and self.states.keys() >= set(parts.states)
        )

    @property
    def parts(self) -> PrefixParts:
        """What there is of it."""
        return PrefixParts(len(self.blocks), tuple(self.windows), tuple(self.states))
