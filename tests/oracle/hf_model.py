"""transformers' own model of qwen3moe, filled from a GGUF file by the gguf package: the float oracle.

Reads the file without a line of thermocline. Needs `torch` and `transformers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.oracle.decoded import decoded_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_TRUNK = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.gate",
}


def open_qwen3moe(path: Path) -> HfModel:
    """Return the model of a qwen3moe file."""
    weights = decoded_weights(path)
    tied = "output.weight" not in weights
    config = _config(path, tied=tied)
    return HfModel(
        Qwen3MoeForCausalLM(config), _state(weights, config.num_hidden_layers), tied=tied
    )


class HfModel:
    """A model in float32 with plain attention, filled with `state`; every call starts from nothing.

    state: None where the model has its weights already.
    """

    def __init__(
        self, model: torch.nn.Module, state: dict[str, torch.Tensor] | None, *, tied: bool
    ) -> None:
        torch.set_num_threads(1)  # products this small only lose by sharing
        self._model = model.eval().requires_grad_(False)
        if state is None:
            return
        missing, unexpected = self._model.load_state_dict(state, strict=False)
        assert not unexpected, unexpected
        assert missing == (["lm_head.weight"] if tied else []), missing

    @property
    def module(self) -> torch.nn.Module:
        """transformers' model itself."""
        return self._model

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the logits after every token: float32 [tokens, vocabulary]."""
        with torch.inference_mode():
            return self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].numpy()

    def states(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return what the head sees of every token: float32 [tokens, hidden]."""
        with torch.inference_mode():
            out = self._model.model(torch.tensor([list(token_ids)]), use_cache=False)
            return out.last_hidden_state[0].numpy()

    def greedy(self, token_ids: Sequence[int], count: int) -> tuple[list[int], float]:
        """Return the `count` most likely next tokens, and the least lead of a winner over the next.

        The lead is in logits: a lead near zero would make the comparison a matter of luck.
        """
        tokens: list[int] = []
        least = float("inf")
        step, cache = torch.tensor([list(token_ids)]), None
        with torch.inference_mode():
            for _ in range(count):
                out = self._model(step, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                best = torch.topk(out.logits[0, -1], 2)
                least = min(least, float(best.values[0] - best.values[1]))
                tokens.append(int(best.indices[0]))
                step = best.indices[:1][None]
        return tokens, least


def _config(path: Path, *, tied: bool) -> Qwen3MoeConfig:
    fields = gguf.GGUFReader(path).fields

    def value(key: str):
        return fields[f"qwen3moe.{key}"].contents()

    return Qwen3MoeConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"].data),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        moe_intermediate_size=value("expert_feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        num_experts=value("expert_count"),
        num_experts_per_tok=value("expert_used_count"),
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        max_position_embeddings=value("context_length"),
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=tied,
        hidden_act="silu",
        attn_implementation="eager",
        experts_implementation="eager",
        dtype="float32",
    )


def _state(weights: dict[str, np.ndarray], num_layers: int) -> dict[str, torch.Tensor]:
    state = {theirs: weights[name] for name, theirs in _TRUNK.items() if name in weights}
    for layer in range(num_layers):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        for name, other in _LAYER.items():
            state[f"{theirs}{other}.weight"] = weights[f"{ours}{name}.weight"]
        gate, up, down = (
            weights[f"{ours}ffn_{role}_exps.weight"] for role in ("gate", "up", "down")
        )
        state[f"{theirs}mlp.experts.gate_up_proj"] = np.concatenate((gate, up), axis=1)
        state[f"{theirs}mlp.experts.down_proj"] = down
    return {name: torch.from_numpy(values) for name, values in state.items()}
