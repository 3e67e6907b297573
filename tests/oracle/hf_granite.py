"""transformers' own models of Granite with windows, as `hf_archs` takes them.

Knows what they have besides Granite's other models, which `hf_routers` knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import transformers

from tests.oracle.hf_routers import granite_settings, granite_state, scaled_rope

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tests.oracle.hf_archs import Keys

    State = dict[str, np.ndarray]


def _model(config: Any) -> torch.nn.Module:
    """The model; its table of the one base is where other models have theirs, too."""
    if isinstance(config, transformers.GraniteSWAConfig):
        model: Any = transformers.GraniteSWAForCausalLM(config)
    else:
        model = transformers.GraniteMoeSWAForCausalLM(config)
    for rotary in model.model.rotary_embs:
        model.model.rotary_emb = rotary
    return model


def _config(keys: Keys, common: dict[str, Any]) -> Any:
    settings = granite_settings(keys, common) | scaled_rope(keys)
    turning = keys("attention.rope_pattern", [True] * keys.num_layers)
    own = {
        "attention_bias": "blk.0.attn_q.bias" in keys.shapes,
        "sliding_window": keys("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if is_window else "full_attention"
            for is_window in keys("attention.sliding_window_pattern")
        ],
        "layer_rope_theta": [keys("rope.freq_base") if turns else 0 for turns in turning],
    }
    if keys("expert_count"):
        return transformers.GraniteMoeSWAConfig(**(settings | own))
    return transformers.GraniteSWAConfig(**(settings | own))


def _state(keys: Keys, own: State) -> State:
    own = dict(own)
    sinks = {"self_attn.sinks": own.pop("attn_sinks.weight")}
    if "ffn_gate_up_exps.weight" in own:
        both = own.pop("ffn_gate_up_exps.weight")
        own["ffn_gate_exps.weight"], own["ffn_up_exps.weight"] = np.split(both, 2, axis=1)
    if "ffn_up_shexp.weight" in own:
        both = own.pop("ffn_up_shexp.weight")
        own["ffn_gate_shexp.weight"], own["ffn_up_shexp.weight"] = np.split(both, 2)
    return granite_state(keys, own) | sinks


CLASSES: dict[str, Callable[[Any], torch.nn.Module]] = {"granite_swa": _model}
CONFIGS: dict[str, Callable[[Keys, dict[str, Any]], Any]] = {"granite_swa": _config}
STATES: dict[str, Callable[[Keys, State], State]] = {"granite_swa": _state}
