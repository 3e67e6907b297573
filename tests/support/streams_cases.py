"""Toy models with several residual streams and n-gram embeddings, as options of `ToyArch`: Qwen3.8-Flash-Next in small."""

from __future__ import annotations

from typing import Any


def _reads(count: int, ratios: list[int], **own: int) -> dict[str, Any]:
    """A token reads `count` positions in whole blocks, and what is behind the last whole block."""
    indexer = {f"attention.indexer.{key}": value for key, value in own.items()}
    return {
        "attention.indexer.top_k": count,
        "attention.compress_ratios": ratios,
        **indexer,
    }


_BIGRAMS = {
    "ple.layers": [2],
    "ple.ngram_size": 2,
    "ple.heads_per_ngram": 3,
    "ple.conv_kernel": 3,
    "ple.eos_token_id": 213,  # the fourth token of every prompt
    "embedding_length_per_layer_input": 10,
}
_TWO_STREAMS = {"hyper_connection.count": 2, "hyper_connection.low_rank": 11}
_FIVE_GRAMS = {"ple.layers": [0], "ple.ngram_size": 5, "ple.heads_per_ngram": 2}
_WIDER = {"ple.layers": [2], "embedding_length_per_layer_input": 12}
_UNEVEN = {
    "hidden": 30,
    "heads": 3,
    "kv_heads": 3,
    "head_dim": 10,
    "experts": 5,
    "used": 3,
    "intermediate": 19,
    "shared": 23,
    "key_heads": 3,
    "value_heads": 6,
    "state": 10,
    "conv_width": 3,
}
STREAMS_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {
        "layers": 4,
        "rotary": 8,
        "extra": _reads(8, [0, 0, 0, 4]) | {"ple.layers": [1]},
        "seed": 181,
    },
    "two_choices": {
        "layers": 5,
        "rotary": 16,
        "interval": 2,
        "extra": _reads(8, [0, 4, 0, 4, 0], head_count=16) | _WIDER,
        "seed": 182,
    },
    "odd": {
        **_UNEVEN,
        "layers": 5,
        "interval": 2,
        "rotary": 6,
        "extra": _reads(6, [0, 3, 0, 3, 0], head_count=13, key_length=18) | _BIGRAMS | _TWO_STREAMS,
        "seed": 183,
    },
    "odd_all_positions": {
        **_UNEVEN,
        "layers": 5,
        "interval": 2,
        "rotary": 6,
        "extra": _reads(513, [0, 3, 0, 3, 0], head_count=13, key_length=18)
        | _BIGRAMS
        | _TWO_STREAMS,
        "seed": 188,
    },
    "all_positions": {
        "layers": 4,
        "rotary": 8,
        "extra": _reads(4096, [0, 0, 0, 4]),
        "seed": 184,
    },
    "no_ngrams": {
        "layers": 4,
        "rotary": 8,
        "fused": True,
        "tied": True,
        "extra": _reads(8, [0, 0, 0, 4]) | {"ple.layers": None},
        "seed": 185,
    },
    "lone_positions": {
        "layers": 4,
        "interval": 2,
        "rotary": 16,
        "extra": _reads(12, [0, 1, 0, 1]) | _FIVE_GRAMS,
        "seed": 186,
    },
    "dense_attention": {
        "layers": 4,
        "interval": 2,
        "rotary": 8,
        "extra": _reads(8, [0, 0, 0, 0]),
        "seed": 187,
    },
}
"""A token reads whole blocks of positions and the incomplete one behind them, at most; `all_positions` reads all.

Layers after one that attends see what it read, so that llama.cpp, which reads more where the last block is incomplete,
can be compared of those alone whose last layer attends.
"""

STREAMS_MIXED: dict[str, Any] = {
    "layers": 4,
    "heads": 4,
    "rotary": 32,
    "seed": 191,
    "extra": _reads(24, [0, 4, 0, 4])
    | {"hyper_connection.low_rank": 96, "embedding_length_per_layer_input": 32},
}
"""For a quantised model."""
