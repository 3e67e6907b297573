"""Toy models with blocks behind the last layer that guess further tokens, by the GGUF convention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.known_files import write_known
from tests.support.toy_archs import (
    ToyArch,
    toy_arch_metadata,
    toy_arch_weights,
    toy_layer,
    write_toy_arch,
)
from tests.support.toy_parts import Draw, Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DRAFTING_TOYS = MappingProxyType(
    {
        "qwen35moe": ToyArch("qwen35moe", layers=4, rotary=8),
        "qwen35": ToyArch("qwen35", layers=4, rotary=8, experts=0, used=0),
        "qwen3next": ToyArch("qwen3next", layers=4, rotary=8),
        "cohere2moe": ToyArch("cohere2moe", window=16, shared=64),
        "glm4moe": ToyArch("glm4moe", rotary=8),
        "deepseek2": ToyArch(
            "deepseek2",
            head_dim=24,
            rotary=8,
            query_rank=24,
            extra={"expert_gating_func": 2, "expert_weights_norm": True},
        ),
        **{
            arch: ToyArch(
                arch,
                head_dim=24,
                rotary=8,
                query_rank=24,
                extra={
                    "attention.indexer.top_k": 4,
                    "expert_gating_func": 2,
                    "expert_weights_norm": True,
                },
            )
            for arch in ("deepseek32", "glm-dsa")
        },
        "bailingmoe3": ToyArch("bailingmoe3", layers=4, head_dim=24, rotary=8, query_rank=24),
        "bailingmoe3 limited": ToyArch(
            "bailingmoe3",
            layers=2,
            interval=2,
            head_dim=24,
            rotary=8,
            query_rank=24,
            extra={"swiglu_clamp_exp": [0.0, 0.5], "swiglu_clamp_shexp": [0.0, 0.6]},
        ),
        "hy_v3": ToyArch("hy_v3"),
        "step35": ToyArch("step35", layers=6, window=16, seed=3),
        "mimo2": ToyArch("mimo2", layers=4, window=16, rotary=8, joined=True, value_dim=8, seed=4),
        "nemotron_h_moe": ToyArch("nemotron_h_moe", layers=5),
        "nemotron_h_moe narrow": ToyArch("nemotron_h_moe", layers=5, narrow=40),
    }
)
"""By the names of cases. The keys and tensors are what llama.cpp asks for, too."""
SEVERAL = MappingProxyType({"step35": 3, "mimo2": 3})
"""Blocks by architecture, where a file has several, of which each guesses one place."""
DRAFTING_CASES = tuple(
    (name, own_ends)
    for name in DRAFTING_TOYS
    for own_ends in (False, True)
    if not (own_ends and name.startswith(("bailing", "nemotron")))
)
"""With whether the block has ends of its own: llama.cpp knows none of Ling's and Nemotron's."""
BLOCK_TOKENS = (3, 200, 17, 5, 64, 9, 9, 100, 7, 30, 41, 2)
CHAINED_TOKENS = (77, 8, 151)
"""After these."""
GOLDEN_BLOCKS = Path(__file__).parents[1] / "golden" / "next_blocks.npz"
"""By case: what `chained_logits` gives of llama.cpp, of BLOCK_TOKENS, their rows GOLDEN_ROWS, and CHAINED_TOKENS."""
GOLDEN_ROWS = (0, 1, 11)


def case_name(name: str, own_ends: bool) -> str:
    """Return how a case is called."""
    return f"{name} own ends" if own_ends else name


def chained_logits(
    run: Callable[[int, Sequence[int], np.ndarray, int], tuple[np.ndarray, np.ndarray]],
    num_blocks: int,
    before: np.ndarray,
    tokens: Sequence[int] = BLOCK_TOKENS,
    chain: Sequence[int] = CHAINED_TOKENS,
    rows: Sequence[int] = GOLDEN_ROWS,
) -> np.ndarray:
    """Return the logits of blocks after some rows of known tokens and after a draft's, float32 [n, V].

    run(place, tokens, before, start) gives a block's logits and states; each block keeps what it saw before. One block alone
    takes its own states. Of several each computes the known tokens with the model's states, `before`, and then the draft
    up to its place with what the blocks of the places before gave.
    """
    if num_blocks == 1:
        logits, states = run(0, tokens, before, 0)
        found = [logits[list(rows)]]
        for position, token in enumerate(chain, len(tokens)):
            logits, states = run(0, [token], states[-1:], position)
            found.append(logits)
        return np.concatenate(found)
    found, given = [], []
    for place in range(num_blocks):
        logits, states = run(place, tokens, before, 0)
        found.append(logits[list(rows)])
        if place:
            logits, states = run(place, chain[:place], np.stack(given), len(tokens))
            found.append(logits)
        given.append(states[-1])
    return np.concatenate(found)


def states_before(toy: ToyArch) -> np.ndarray:
    """Return float32 [tokens, D] that stand for the trunk's states before BLOCK_TOKENS, zeros before the first."""
    states = Draw(5).vector(len(BLOCK_TOKENS), toy.hidden, spread=1.0)
    states[0] = 0
    return states


def next_block_weights(toy: ToyArch, *, own_ends: bool = False) -> Weights:
    """Return the tensors of all blocks. own_ends: with an embedding, a norm and a head of their own."""
    weights = {}
    for place in range(SEVERAL.get(toy.arch, 1)):
        draw = Draw(toy.seed + 1 + place)
        weights |= _block(toy, draw, place, own_ends=own_ends)
    return weights


def _block(toy: ToyArch, draw: Draw, place: int, *, own_ends: bool) -> Weights:
    norms = {f"nextn.{name}.weight": draw.gain(toy.hidden) for name in ("enorm", "hnorm")}
    weights = norms | _layer(toy, draw, place)
    weights["nextn.eh_proj.weight"] = draw.matrix(toy.hidden, 2 * toy.hidden)
    if toy.arch == "bailingmoe3":
        weights["layer_output_norm.weight"] = draw.gain(toy.hidden)
    elif own_ends or toy.arch == "nemotron_h_moe":
        weights["nextn.shared_head_norm.weight"] = draw.gain(toy.hidden)
    if own_ends:
        num_tokens = len(toy_arch_metadata(toy)["tokenizer.ggml.tokens"])
        weights["nextn.embed_tokens.weight"] = draw.vector(num_tokens, toy.hidden, spread=1.0)
        weights["nextn.shared_head_head.weight"] = draw.matrix(num_tokens, toy.hidden, gain=3.0)
    return {f"blk.{toy.layers + place}.{name}": values for name, values in weights.items()}


def next_block_metadata(toy: ToyArch) -> dict[str, Any]:
    """Return the keys that change with blocks: they count as some of all, and have their places in lists."""
    found, prefix, count = toy_arch_metadata(toy), f"{toy.arch}.", SEVERAL.get(toy.arch, 1)
    keys = {prefix + "block_count": toy.layers + count, prefix + "nextn_predict_layers": count}
    if toy.arch in SEVERAL:
        longer = toy_arch_metadata(replace(toy, layers=toy.layers + count))
        lists = (name for name, value in found.items() if isinstance(value, list))
        return keys | {name: longer[name] for name in lists if name.startswith(prefix)}
    limits = "swiglu_clamp_exp", "swiglu_clamp_shexp"
    for name in ("attention.head_count_kv", "feed_forward_length", *limits):
        values = found.get(prefix + name)
        if isinstance(values, list):
            keys[prefix + name] = [*values, max(values)]
    return keys


def write_drafting_toy(path: Path, toy: ToyArch, *, own_ends: bool = False) -> Path:
    """Write a toy model with its blocks."""

    def write(place: Path) -> Path:
        weights = toy_arch_weights(toy) | next_block_weights(toy, own_ends=own_ends)
        return write_toy_arch(place, toy, weights=weights, metadata=next_block_metadata(toy))

    return write_known(path, ("drafting", toy, own_ends), write)


def _layer(toy: ToyArch, draw: Draw, place: int) -> Weights:
    if toy.arch in SEVERAL:  # the last is dense, and all of MiMo's
        index = toy.layers + place
        is_dense = toy.arch == "mimo2" or place == SEVERAL[toy.arch] - 1
        return toy_layer(replace(toy, dense=index + 1 if is_dense else 0), draw, index)
    if toy.arch == "nemotron_h_moe":
        experts = toy_layer(toy, draw, 4)
        experts["post_attention_norm.weight"] = experts.pop("attn_norm.weight")
        return experts | toy_layer(toy, draw, 3)
    # Behind a whole number of intervals, as Ling's is, a layer attends by itself.
    attends = toy.interval - 1 if toy.arch in ("qwen35", "qwen35moe", "qwen3next") else toy.layers
    return toy_layer(toy, draw, attends)
