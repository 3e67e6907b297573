"""A block behind the trunk that guesses the token after the next one (MTP, NextN): its weights, and computing it.

Knows no request: callers give tokens, hidden states, and places in a cache. Nothing of the file is read before it is
computed, but for the gains of norms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.dense_contract import Centering, RopeTable
from thermocline.kernels.whole_layer import AttentionWeights, LatentWeights, LayerInput
from thermocline.messages import LayerIndex
from thermocline.models.latent_attention import begin_latent_attention
from thermocline.models.layers import RotaryTable, add_experts, begin_attention, route
from thermocline.models.norms import norm_rows
from thermocline.models.weights import WeightMap

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.kernels.cache_format import HeadShape
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import LayerCache
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.kv.pool import KVPool
    from thermocline.messages import Chunk
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec

_LEAST_CUT_TOKENS: Final = 32_768
"""The head of a smaller vocabulary takes too little to be cut."""


class NextTokenBlock:
    """One block. Its input at a position is the token there, and the hidden state of the position before.

    A model may have several, of which each guesses one place of a draft. Each has a layer of the drafter's cache.
    """

    def __init__(
        self,
        file: ModelFile,
        kernels: Kernels,
        spec: ModelSpec,
        read_block: Callable[[WeightMap, ModelSpec, int], DecoderLayer],
        place: int = 0,
    ) -> None:
        """read_block: see `Architecture.read_next_block`. place: of the block among all. Raises ModelError."""
        self.spec = spec
        self._kernels = kernels
        self._place, index = place, spec.num_layers + place
        weights, hidden, prefix = WeightMap(file), spec.hidden_size, f"blk.{index}."
        self._layer = read_block(weights, spec.with_next_blocks, index)
        assert isinstance(self._layer.parts.mixer, AttentionWeights | LatentWeights), "it attends"
        own = f"{prefix}nextn."
        self._join = weights.matrix(f"{own}eh_proj.weight", hidden, 2 * hidden)
        self._token_norm = weights.vector(f"{own}enorm.weight", hidden)
        self._state_norm = weights.vector(f"{own}hnorm.weight", hidden)
        norms = f"{own}shared_head_norm.weight", f"{prefix}layer_output_norm.weight"
        norm = _first(weights, *norms, spec.output_norm)
        self._norm = weights.vector(norm, hidden)
        embedding = weights.table(
            _first(weights, f"{own}embed_tokens.weight", "token_embd.weight"),
            spec.vocab_size,
            hidden,
        )
        self._embedding = replace(embedding, scale=embedding.scale * spec.embedding_scale)
        name = _first(weights, f"{own}shared_head_head.weight", "output.weight")
        if name not in weights:  # tied
            name = "token_embd.weight"
        head = weights.matrix(name, spec.vocab_size, hidden)
        head = replace(head, scale=head.scale * spec.logit_scale)
        self._heads = {
            num_tokens: replace(head, raw=head.raw[:num_tokens]) for num_tokens in self.head_cuts
        }
        weights.finish(prefix)
        rope = self._layer.rope
        self._rotary = None if rope is None else RotaryTable(kernels.dense, rope)

    def __repr__(self) -> str:
        return f"NextTokenBlock(block {self.spec.num_layers + self._place} of {self.spec.name})"

    @property
    def kv_shapes(self) -> tuple[HeadShape, ...]:
        """Heads of its keys and values: those of one layer."""
        return (self.spec.next_block_shapes[self._place],)

    @property
    def state_width(self) -> int:
        """D, the numbers of a state."""
        return self.spec.hidden_size

    @property
    def head_cuts(self) -> tuple[int, ...]:
        """For so many first tokens `logits` can be asked, ascending; the last are all."""
        size = self.spec.vocab_size
        return (size,) if size < _LEAST_CUT_TOKENS else (size // 4, size // 2, size)

    def states(self, chunk: Chunk, before: FloatArray, cache: KVPool) -> FloatArray:
        """Return float32 [T, D], from which `logits` guesses; appends the chunk's keys and values to `cache`.

        before: float32 [T, D], of each row the hidden state of the position before it: the trunk's behind its final norm
        (before it where blocks take raw ones), or what this or the block before gave; zeros before the first position.
        """
        dense, epsilon, prompt = self._kernels.dense, self.spec.rms_epsilon, chunk.is_prompt
        centering = Centering() if self.spec.norms_center else None
        token = self._kernels.decode_rows(self._embedding, chunk.token_ids)
        joined = np.concatenate(
            (
                norm_rows(dense, token, self._token_norm, epsilon, centering),
                norm_rows(dense, before, self._state_norm, epsilon, centering),
            ),
            axis=1,
        )
        x = self._kernels.matmul(self._join, joined, prompt=prompt)
        x = self._compute_layer(chunk, x, cache.layer(LayerIndex(self._place)))
        return x if self.spec.next_blocks_raw else self._normed(x)

    def logits(self, states: FloatArray, num_tokens: int | None = None) -> FloatArray:
        """Return float32 [rows, num_tokens]: what comes after the tokens of these rows of `states`.

        num_tokens: one of `head_cuts`; None for all.
        """
        head = self._heads[self.spec.vocab_size if num_tokens is None else num_tokens]
        states = np.ascontiguousarray(states)
        normed = self._normed(states) if self.spec.next_blocks_raw else states
        return self._kernels.matmul(head, normed)

    def _normed(self, x: FloatArray) -> FloatArray:
        spec = self.spec
        centering = Centering() if spec.norms_center or spec.next_block_centers else None
        return norm_rows(self._kernels.dense, x, self._norm, spec.rms_epsilon, centering)

    def _compute_layer(self, chunk: Chunk, x: FloatArray, cache: LayerCache) -> FloatArray:
        kernels, parts, prompt = self._kernels, self._layer.parts, chunk.is_prompt
        rope = self._rope(chunk.positions)
        if kernels.whole_layer is not None:
            given = LayerInput(
                x, chunk.positions, chunk.kv_slots, rope, chunk.segments, cache, prompt
            )
            return kernels.whole_layer(parts, given)[0]
        if isinstance(parts.mixer, LatentWeights):
            x = begin_latent_attention(kernels, parts.mixer, rope, chunk, x, cache)()
        else:
            assert isinstance(parts.mixer, AttentionWeights), "checked when it was opened"
            x = begin_attention(kernels, parts, rope, chunk, x, cache)()
        return add_experts(kernels, parts, route(kernels, parts, x, prompt=prompt), prompt=prompt)

    def _rope(self, positions: IntArray) -> RopeTable:
        if self._rotary is not None:
            return self._rotary.at(positions)
        nothing = np.empty((len(positions), 0), np.float32)
        return RopeTable(nothing, nothing)


def _first(weights: WeightMap, *names: str) -> str:
    """Return the name of the block's own tensor, else that of the model's, which is the last."""
    return next((name for name in names if name in weights), names[-1])
