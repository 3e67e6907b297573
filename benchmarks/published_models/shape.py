"""What a published model consists of: its numbers, its vocabulary, and how its family lays them out.

Knows no family and no file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.published_models.vocabulary import Vocabulary

Value = bool | int | float | str | tuple[int, ...] | tuple[bool, ...] | tuple[str, ...]
Metadata = dict[str, Value]
"""Keys as GGUF has them; int is stored as uint32, float as float32, ints of an array as int32."""

Part = tuple[str, tuple[int, ...]]
"""A tensor's name within its block, and its shape in NumPy order."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The gated delta rule of a hybrid model. Every `interval`-th layer has full attention instead, and so have `full`."""

    conv: int
    key_heads: int
    value_heads: int
    state: int
    interval: int = 4
    full: tuple[int, ...] = ()

    @property
    def channels(self) -> int:
        """Numbers of a token that go through the convolution."""
        return (2 * self.key_heads + self.value_heads) * self.state

    @property
    def values(self) -> int:
        """Numbers of a token's values."""
        return self.value_heads * self.state


@dataclass(frozen=True, slots=True)
class Mamba:
    """Mamba2 in a model whose blocks are one thing each. pattern: of each block, M Mamba2, * attention, E experts."""

    conv: int
    heads: int
    head_dim: int
    groups: int
    state: int
    pattern: str

    @property
    def width(self) -> int:
        """Numbers of a token's values."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that go through the convolution."""
        return self.width + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True)
class Window:
    """Layers with a sliding window, which have other heads and rotary positions than the full ones.

    Of each `period` layers the first has full attention, or the one at `full_at`. kv_heads, head_dim: where they differ.
    """

    tokens: int
    heads: int
    rope_base: float
    rotary: int
    period: int = 4
    full_at: int = 0
    kv_heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Yarn:
    """How rotary positions are stretched."""

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's numbers. feed_forward is None where the configuration has none; rotary None is the whole head."""

    layers: int
    hidden: int
    feed_forward: int | None
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_base: float
    rms_epsilon: float
    experts: int
    used: int
    expert_width: int
    shared_width: int = 0
    rotary: int | None = None
    mrope_sections: tuple[int, ...] = ()
    delta: Delta | None = None
    mamba: Mamba | None = None
    window: Window | None = None
    yarn: Yarn | None = None
    routed_scale: float = 1.0
    dense_layers: int = 0
    mtp_blocks: int = 0
    softcap: float = 0.0

    @property
    def blocks(self) -> int:
        """Blocks in the file: layers, then those that predict further tokens."""
        return self.layers + self.mtp_blocks

    def is_recurrent(self, block: int) -> bool:
        """Whether a block has the gated delta rule or Mamba2; blocks after the layers have attention."""
        if self.mamba is not None:
            return self.mamba.pattern[block] == "M"
        if self.delta is None or block >= self.layers or block in self.delta.full:
            return False
        return (block + 1) % self.delta.interval > 0

    def heads_of(self, layer: int) -> int:
        """Query heads of a layer."""
        return self.window.heads if self.window and self.is_window(layer) else self.heads

    def is_window(self, layer: int) -> bool:
        """Whether a layer has a sliding window."""
        return self.window is not None and layer % self.window.period != self.window.full_at


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture's files are laid out, as llama.cpp's converter writes them.

    metadata: the keys from block_count on, without the architecture's prefix. block: the tensors of one block. is_tied:
    the head is the embedding. constants: vectors of no block besides, with their numbers.
    """

    architecture: str
    metadata: Callable[[Shape], Metadata]
    block: Callable[[Shape, int], Iterator[Part]]
    is_tied: bool = False
    constants: Callable[[Shape], dict[str, tuple[float, ...]]] = lambda _: {}


Mix = Literal["Q4_K_M", "BF16", "MXFP4"]


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """One model: the row of a table.

    billions: all parameters without blocks that predict further tokens, as the model's card says. config_class: transformers' configuration class.
    own: fields of `shape` in which the model's config.json differs from the defaults of that class; all others are
    those defaults (tests/oracle/test_published_models.py compares them).
    """

    name: str
    billions: str
    family: Family
    shape: Shape
    vocabulary: Vocabulary
    config_class: str
    own: frozenset[str]
    mix: Mix = "Q4_K_M"
    """Of the file that most people have."""

    def tensors(self) -> list[Part]:
        """All tensors, in the order in which llama.cpp's quantiser writes them: by block, then by name."""
        size, hidden = self.vocabulary.size, self.shape.hidden
        found: list[Part] = [] if self.family.is_tied else [("output.weight", (size, hidden))]
        found += [("output_norm.weight", (hidden,)), ("token_embd.weight", (size, hidden))]
        constants = self.family.constants(self.shape)
        found += [(name, (len(values),)) for name, values in constants.items()]
        for block in range(self.shape.blocks):
            parts = sorted(self.family.block(self.shape, block))
            found += [(f"blk.{block}.{name}", shape) for name, shape in parts]
        return found

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(shape) for _, shape in self.tensors())
