"""transformers' own drafter of Gemma 4, filled from a GGUF file, beside its model of the file that it drafts for.

Reads both without a line of thermocline. Needs `torch` and `transformers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self
from unittest import mock

import numpy as np
import torch
import transformers

from tests.oracle.decoded import decoded_weights
from tests.oracle.hf_archs import Keys, open_hf
from tests.oracle.hf_gemma import gemma4_config, gemma4_state

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.oracle.hf_model import HfModel

_NAMES = {
    "token_embd.weight": ("model.embed_tokens.weight", "lm_head.weight"),
    "output_norm.weight": ("model.norm.weight",),
    "nextn.pre_projection.weight": ("pre_projection.weight",),
    "nextn.post_projection.weight": ("post_projection.weight",),
}


def _sharing_modes(config: Any) -> list[str]:
    """Return what each layer does with keys and values.

    Release 5.23 asks for a layer that has some in a drafter, too, where none has, and gives those of a model away only where
    the model's own last layers read them.
    """
    num_own = config.num_hidden_layers - config.num_kv_shared_layers
    last = {kind: index for index, kind in enumerate(config.layer_types[:num_own])}
    own = ["store" if index in last.values() else "" for index in range(num_own)]
    return own + ["reuse"] * config.num_kv_shared_layers


SHARING = property(_sharing_modes)
"""In place of the configuration's own `kv_sharing_modes`, while models are made."""


class HfAssistant:
    """A drafter over transformers' model; every call starts from nothing."""

    def __init__(self, model: HfModel, drafter: transformers.PreTrainedModel, window: int) -> None:
        """window: the drafter's. Both models are in float32 with plain attention."""
        self._model = model.module
        self._drafter = drafter.eval().requires_grad_(False)
        self._window = window

    @classmethod
    def from_files(cls, target: Path, drafter: Path) -> Self:
        """Fill both from GGUF files."""
        keys, weights = Keys(drafter), decoded_weights(drafter)
        num_layers = keys("block_count")
        common = keys.common(tied=True) | {"num_hidden_layers": num_layers, "num_experts": None}
        config = transformers.Gemma4AssistantConfig(
            text_config=_text_config(keys, common, num_layers),
            backbone_hidden_size=keys("embedding_length_out"),
        )
        with mock.patch.object(transformers.Gemma4TextConfig, "kv_sharing_modes", SHARING):
            model = transformers.Gemma4AssistantForCausalLM(config)
            trunk = open_hf(target)
        state = {theirs: weights[ours] for ours, names in _NAMES.items() for theirs in names}
        for layer in range(num_layers):
            prefix = f"blk.{layer}."
            own = {n.removeprefix(prefix): v for n, v in weights.items() if n.startswith(prefix)}
            for name, values in gemma4_state(keys, own).items():
                state[f"model.layers.{layer}.{name}"] = values
        model.load_state_dict({name: torch.from_numpy(np.array(v)) for name, v in state.items()})
        return cls(trunk, model, keys("attention.sliding_window"))

    def guesses(self, known: Sequence[int], chain: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return logits [n, V], and the states [n, D] that the next guess takes, behind each token of `chain`.

        known: what the model computes. chain: the newest known token, then guesses, all at its position. Of layers with a
        window the drafter gets what its row sees and no more: the class itself would let it see two positions too many.
        """
        with torch.inference_mode():
            out = self._model(
                torch.tensor([list(known)]),
                use_cache=False,
                output_hidden_states=True,
                return_shared_kv_states=True,
            )
            shared = {
                kind: tuple(
                    part[:, :, -(self._window - 1) :] if kind == "sliding_attention" else part
                    for part in parts
                )
                for kind, parts in out.shared_kv_states.items()
            }
            before, positions = out.hidden_states[-1][:, -1:], torch.tensor([[len(known)]])
            embed, found = self._model.get_input_embeddings(), []
            for token in chain:
                joined = torch.cat([embed(torch.tensor([[token]])), before], dim=-1)
                guess = self._drafter(
                    inputs_embeds=joined, position_ids=positions, shared_kv_states=shared
                )
                before = guess.last_hidden_state
                found.append((guess.logits[0, -1].numpy(), before[0, -1].numpy()))
        logits, following = zip(*found, strict=True)
        return np.stack(logits), np.stack(following)


def _text_config(
    keys: Keys, common: dict[str, object], num_layers: int
) -> transformers.PreTrainedConfig:
    config = gemma4_config(keys, common)
    config.vocab_size_per_layer_input = 0
    config.num_kv_shared_layers = num_layers
    return config
