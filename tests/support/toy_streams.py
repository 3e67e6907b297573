"""Keys and random tensors of toy models with several residual streams and n-gram embeddings, by the GGUF convention.

`ToyArch.interval` says which layers attend. Counts that only this architecture has come from `ToyArch.extra`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from tests.support.gguf_files import GGUFValue
from tests.support.toy_model import byte_vocabulary

if TYPE_CHECKING:
    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw

LEAST_ROWS = 60
"""Rows that the first head of n-grams chooses among, at least: a prime number of them, and the next primes for the next heads."""
PADDED_ROWS = 32
"""The table's rows are a multiple, as the published one's are of 128."""
_DEFAULTS: dict[str, Any] = {
    "hyper_connection.count": 4,
    "hyper_connection.low_rank": 24,
    "attention.indexer.head_count": 8,  # of few heads none may speak for some blocks, and the oracles break ties otherwise
    "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 4096,
    "ple.layers": [0],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 4,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 178,  # stands once among the first 65 tokens of prompts, and then at least twice
    "embedding_length_per_layer_input": 8,
}
_OF_NGRAMS = ("ple.", "embedding_length_per_layer_input")


def streams_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the metadata that the older sibling does not have."""
    attends = [_attends(toy, layer) for layer in range(toy.layers)]
    own = _DEFAULTS | {
        "feed_forward_length": None,
        "attention.recurrent_layers": [not flag for flag in attends],
        "attention.compress_ratios": [4 if flag else 0 for flag in attends],
    }
    if not _ngram_layers(toy):
        return {key: value for key, value in own.items() if not key.startswith(_OF_NGRAMS)}
    sizes = _head_sizes(toy)
    # The largest whose products with tokens have 63 bits, as transformers draws them.
    largest = (2**63 - 1) // len(byte_vocabulary()[0])
    drawn = np.random.default_rng(toy.seed).integers(
        largest // 4, largest // 2, _read(toy, "ple.ngram_size")
    )
    return own | {
        "ple.layer_multipliers": _wide([2 * int(number) + 1 for number in drawn]),
        "ple.head_offsets": _wide([sum(sizes[:head]) for head in range(len(sizes))]),
        "ple.head_vocab_sizes": _wide(sizes),
    }


def streams_top(toy: ToyArch, draw: Draw) -> dict[str, np.ndarray]:
    """Return the tensors of no layer: what mixes the streams at the end, and the table of n-grams."""
    weights = {
        f"output_hc_{name}": values for name, values in _mixer(toy, draw, inject=False).items()
    }
    if _ngram_layers(toy):
        rows = -(-sum(_head_sizes(toy)) // PADDED_ROWS) * PADDED_ROWS
        width = _read(toy, "embedding_length_per_layer_input")
        weights["per_layer_token_embd.weight"] = draw.vector(rows, width, spread=1.0)
    return weights


def streams_layer(
    toy: ToyArch, draw: Draw, layer: int, mixer: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return one layer, which is that of its older sibling `mixer` without norms, and more."""
    weights = {
        name: values
        for name, values in mixer.items()
        if name not in ("attn_norm.weight", "post_attention_norm.weight")
    }
    for part in ("attn", "ffn"):
        mixing = _mixer(toy, draw, inject=True)
        weights |= {f"hc_{part}_{name}": values for name, values in mixing.items()}
    if _attends(toy, layer):
        heads, dim = (
            _read(toy, f"attention.indexer.{key}") for key in ("head_count", "key_length")
        )
        weights |= {
            "indexer.q_proj.weight": draw.matrix(heads * dim, toy.hidden),
            "indexer.k_proj.weight": draw.matrix(dim, toy.hidden),
            "indexer.q_norm.weight": draw.gain(dim),
            "indexer.k_norm.weight": draw.gain(dim),
        }
    if layer in _ngram_layers(toy):
        width = _read(toy, "hyper_connection.count") * toy.hidden
        grams = len(_head_sizes(toy)) * _read(toy, "embedding_length_per_layer_input")
        weights |= {
            "ple_key.weight": draw.matrix(width, grams),
            "ple_value.weight": draw.matrix(toy.hidden, grams),
            "ple_norm_key.weight": draw.gain(width),
            "ple_norm_query.weight": draw.gain(width),
            "ple_norm_conv.weight": draw.gain(width),
            "ple_conv1d.weight": draw.vector(width, _read(toy, "ple.conv_kernel"), spread=0.5),
        }
    return weights


def _mixer(toy: ToyArch, draw: Draw, *, inject: bool) -> dict[str, np.ndarray]:
    """Return what reads one stream of several, with gates that are neither all open nor all shut."""
    count, rank = (_read(toy, f"hyper_connection.{key}") for key in ("count", "low_rank"))
    width = count * toy.hidden
    weights = {
        "norm.weight": draw.gain(width),
        # What these give is divided by the number of streams.
        "down.weight": draw.matrix(rank, width, gain=1.5 * count),
        "up.weight": draw.matrix(width, rank, gain=2.0),
    }
    if inject:
        weights["inject.weight"] = draw.matrix(count, width, gain=1.5 * count)
    return weights


def _read(toy: ToyArch, key: str) -> Any:
    return toy.extra.get(key, _DEFAULTS[key])


def _ngram_layers(toy: ToyArch) -> list[int]:
    """Return which layers add embeddings of n-grams: one, or none where a case names no key."""
    return _read(toy, "ple.layers") or []


def _attends(toy: ToyArch, layer: int) -> bool:
    return (layer + 1) % toy.interval == 0


def _head_sizes(toy: ToyArch) -> list[int]:
    """Return how many rows each head of n-grams chooses among."""
    count = (_read(toy, "ple.ngram_size") - 1) * _read(toy, "ple.heads_per_ngram")
    primes = (n for n in range(LEAST_ROWS, 1000) if all(n % part for part in range(2, n)))
    return [next(primes) for _ in range(count)]


def _wide(numbers: list[int]) -> GGUFValue:
    """Return an array of 64-bit numbers, as the converter writes it."""
    return GGUFValue(numbers, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)
