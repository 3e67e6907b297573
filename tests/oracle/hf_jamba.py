"""Configuration and weights of transformers' Jamba, from a GGUF file's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import transformers

from tests.oracle.hf_names import renamed

if TYPE_CHECKING:
    from tests.oracle.hf_archs import Keys, State

TOP = {"token_embd": "embed_tokens", "output_norm": "final_layernorm"}
"""The tensors of no layer, whose names are others than usual."""

_NAMES = {
    "attn_norm.": "input_layernorm.",
    "ffn_norm.": "pre_ff_layernorm.",
    "attn_q.": "self_attn.q_proj.",
    "attn_k.": "self_attn.k_proj.",
    "attn_v.": "self_attn.v_proj.",
    "attn_output.": "self_attn.o_proj.",
    "ssm_in.": "mamba.in_proj.",
    "ssm_x.": "mamba.x_proj.",
    "ssm_dt.": "mamba.dt_proj.",
    "ssm_dt_norm.": "mamba.dt_layernorm.",
    "ssm_b_norm.": "mamba.b_layernorm.",
    "ssm_c_norm.": "mamba.c_layernorm.",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_out.": "mamba.out_proj.",
    "ffn_gate.": "feed_forward.gate_proj.",
    "ffn_up.": "feed_forward.up_proj.",
    "ffn_down.": "feed_forward.down_proj.",
}


def jamba_config(keys: Keys, common: dict[str, Any]) -> Any:
    """Return the configuration. Kinds of layers are periods there, the first of which need not begin a model."""
    for name in ("head_dim", "moe_intermediate_size", "rope_parameters"):
        del common[name]
    kv_heads, hidden = keys("attention.head_count_kv"), keys("embedding_length")
    routed = [f"blk.{n}.ffn_gate_inp.weight" in keys.shapes for n in range(keys.num_layers)]
    attention, experts = _period([count > 0 for count in kv_heads]), _period(routed)
    own = {
        "num_key_value_heads": max(kv_heads),
        "num_experts": keys("expert_count", 1),
        "num_experts_per_tok": keys("expert_used_count", 1),
        "intermediate_size": keys("feed_forward_length"),
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": experts[0],
        "expert_layer_offset": experts[1],
        "mamba_d_state": keys("ssm.state_size"),
        "mamba_d_conv": keys("ssm.conv_kernel"),
        "mamba_expand": keys("ssm.inner_size") // hidden,
        "mamba_dt_rank": keys("ssm.time_step_rank"),
    }
    return transformers.JambaConfig(**(common | own))


def _period(flags: list[bool]) -> tuple[int, int]:
    """Return period and offset of the layers that have something, which is repeated once more than there are layers for."""
    found = [n for n, flag in enumerate(flags) if flag] or [0]
    period = found[1] - found[0] if len(found) > 1 else len(flags) + 1
    return period, found[0]


def jamba_state(keys: Keys, own: State) -> State:
    """Return one layer's weights. A lone expert is a feed-forward without a router there, as its weight is 1."""
    own = dict(own)
    if keys("expert_count", 1) == 1 and "ffn_gate_inp.weight" in own:
        for role in ("gate", "up", "down"):
            own[f"ffn_{role}.weight"] = own.pop(f"ffn_{role}_exps.weight")[0]
        del own["ffn_gate_inp.weight"]
    conv = own.pop("ssm_conv1d.weight", None)
    state = renamed(own, _NAMES)
    if conv is not None:
        state["mamba.conv1d.weight"] = conv[:, None]
        state["mamba.A_log"], state["mamba.D"] = np.log(-own["ssm_a"]), own["ssm_d"]
    if "ffn_gate_inp.weight" in own:
        gate, up, down = (own[f"ffn_{role}_exps.weight"] for role in ("gate", "up", "down"))
        state["feed_forward.router.weight"] = own["ffn_gate_inp.weight"]
        state["feed_forward.experts.gate_up_proj"] = np.concatenate((gate, up), axis=1)
        state["feed_forward.experts.down_proj"] = down
    return state
