"""A small model that guesses the tokens of a larger one with the same vocabulary: runs all of its layers at once.

Knows no request: callers give tokens and places in a cache, as to `NextTokenBlock`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import UnsupportedModelError
from thermocline.kv.cache import SequenceCache
from thermocline.messages import LayerIndex
from thermocline.models.layers import compute_layer
from thermocline.models.registry import open_model, read_spec

if TYPE_CHECKING:
    from thermocline.kernels.cache_format import HeadShape
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.weight import FloatArray
    from thermocline.kv.pool import KVPool
    from thermocline.messages import Chunk
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec

_TOKENS = "tokenizer.ggml.tokens"


class DraftModel:
    """A dense model, whose every layer attends."""

    state_width = 0
    """It takes no state of the larger model."""

    def __init__(self, file: ModelFile, target: ModelFile, kernels: Kernels) -> None:
        """target: the larger model's file. Raises ModelError, also where the two have different vocabularies."""
        self._vocab_size = read_draft_spec(file, target).vocab_size
        self._kernels, self._model = kernels, open_model(file, kernels)
        self._held: SequenceCache | None = None

    def __repr__(self) -> str:
        return f"DraftModel({self._model.spec.name})"

    @property
    def kv_shapes(self) -> tuple[HeadShape, ...]:
        """Heads of keys and values by layer."""
        return self._model.spec.kv_shapes

    @property
    def head_cuts(self) -> tuple[int, ...]:
        """For so many tokens `logits` can be asked: for all."""
        return (self._vocab_size,)

    def states(self, chunk: Chunk, before: FloatArray, cache: KVPool) -> FloatArray:
        """Return float32 [T, D], the last layer's output; appends the chunk's keys and values to `cache`.

        before: not read.
        """
        del before
        model, held = self._model, self._held
        if held is None or held.kv is not cache:
            held = self._held = SequenceCache(cache)
        # The larger model may have a few more tokens at its end, of which this one knows nothing.
        ids = np.where(chunk.token_ids < self._vocab_size, chunk.token_ids, 0).astype(np.int32)
        x = model.embed(ids)
        own = model.embed_layers(ids, x, prompt=chunk.is_prompt)
        chunk = replace(chunk, token_ids=ids, embedded=own)
        if model.has_whole_steps and not (chunk.is_prompt or chunk.has_branches):
            return model.step(chunk, x, held).x
        for index in range(model.spec.num_layers):
            x = compute_layer(self._kernels, model, LayerIndex(index), chunk, x, held)
        return x

    def logits(self, states: FloatArray, num_tokens: int | None = None) -> FloatArray:
        """Return float32 [rows, V]: what comes after the tokens of these rows of `states`. num_tokens: V, or None for it."""
        del num_tokens
        return self._model.head(np.ascontiguousarray(states), prompt=False)


def read_draft_spec(file: ModelFile, target: ModelFile) -> ModelSpec:
    """Return the dimensions of a draft model for `target`. Raises ModelError where it can be none."""
    spec = read_spec(file)
    if spec.has_experts or spec.recurrent is not None or spec.kv_sources:
        raise UnsupportedModelError(
            file.path,
            "a draft model is dense, and each of its layers attends with keys of its own",
            unsupported=(file.architecture,),
            fix="give --draft-model a small dense model of the same family",
        )
    require_same_vocabulary(file, target)
    return spec


def require_same_vocabulary(file: ModelFile, target: ModelFile) -> None:
    """Refuse a draft model whose tokens are not those of `target`. One of the two may have more at the end.

    Raises UnsupportedModelError that names the first token that differs.
    """
    ours, theirs = file.metadata.get_strings(_TOKENS), target.metadata.get_strings(_TOKENS)
    shared = min(len(ours), len(theirs))
    different = [n for n in range(shared) if ours[n] != theirs[n]]
    if not different:
        return
    first = different[0]
    raise UnsupportedModelError(
        file.path,
        f"its vocabulary is not that of {target.paths[0].name}: {len(different)} of {shared} tokens differ",
        unsupported=(f"token {first} is {ours[first]!r}, and {theirs[first]!r} there",),
        fix="give --draft-model a small model of the same family",
    )
