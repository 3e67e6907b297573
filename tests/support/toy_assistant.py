"""Toy drafters of Gemma 4's own kind for toy models of gemma4. The keys and tensors are what llama.cpp asks for, too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tests.support.gguf_files import write_gguf
from tests.support.toy_archs import ToyArch, toy_arch_metadata, toy_arch_weights
from tests.support.toy_parts import Draw, Weights

if TYPE_CHECKING:
    import numpy as np

ARCH = "gemma4-assistant"
_TARGET = ToyArch("gemma4", head_dim=32, kv_heads=1, window=16, fused=True, tied=True, seed=61)


@dataclass(frozen=True)
class ToyPair:
    """A model and its drafter, whose sizes differ where they may."""

    target: ToyArch = _TARGET
    layers: int = 3
    hidden: int = 48
    heads: int = 6
    width: int = 80
    seed: int = 13

    @property
    def drafter(self) -> ToyArch:
        """The drafter, as if it were a model of its own."""
        return replace(
            self.target,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            experts=0,
            used=0,
            shared=self.width,
            layer_embedding=0,
            readers=0,
            tied=True,
            seed=self.seed,
        )


PAIRS = MappingProxyType(
    {
        "experts": ToyPair(),
        "odd": ToyPair(
            ToyArch(
                "gemma4",
                hidden=30,
                heads=3,
                kv_heads=3,
                head_dim=10,
                near_head_dim=6,
                near_kv_heads=1,
                window=7,
                experts=5,
                used=3,
                intermediate=19,
                shared=23,
                seed=62,
            ),
            hidden=21,
            heads=3,
            width=17,
        ),
        "readers": ToyPair(
            replace(
                _TARGET, experts=0, used=0, fused=False, layers=6, readers=3, layer_embedding=8
            ),
            layers=6,
        ),
    }
)
"""By the names of cases: a model with experts; sizes that fit no vector; one whose last layers attend to earlier ones'."""
GOLDEN_ASSISTANTS = Path(__file__).parents[1] / "golden" / "assistants.npz"
"""By the names of PAIRS, what llama.cpp guesses behind KNOWN_TOKENS, and then behind each of CHAINED_TOKENS: its logits,
and under "NAME next" the states that the next guess takes."""
KNOWN_TOKENS = tuple((7 * n) % 90 + 40 for n in range(30))
"""More than a window."""
CHAINED_TOKENS = (77, 8, 151)
"""The newest known token, and guesses behind it."""


def assistant_weights(pair: ToyPair) -> Weights:
    """Return a drafter's tensors: a model's without keys and values, between two projections."""
    toy, draw = pair.drafter, Draw(pair.seed + 1)
    own = ("attn_k.", "attn_k_norm.", "attn_v.")
    weights = {
        name: values
        for name, values in toy_arch_weights(toy).items()
        if not any(part in name for part in own)
    }
    # Its embedding is its head alone.
    weights["token_embd.weight"] = weights["token_embd.weight"] * 3
    weights["nextn.pre_projection.weight"] = draw.matrix(toy.hidden, 2 * pair.target.hidden)
    weights["nextn.post_projection.weight"] = draw.matrix(pair.target.hidden, toy.hidden)
    return weights


def assistant_metadata(pair: ToyPair) -> dict[str, Any]:
    """Return a drafter's metadata, with the model's tokenizer."""
    found = {
        key.replace("gemma4.", f"{ARCH}."): value
        for key, value in toy_arch_metadata(pair.drafter).items()
    }
    return found | {
        "general.name": "toy assistant",
        f"{ARCH}.attention.shared_kv_layers": pair.layers,
        f"{ARCH}.embedding_length_out": pair.target.hidden,
        f"{ARCH}.nextn_predict_layers": pair.layers,
    }


def write_assistant(
    path: Path,
    pair: ToyPair,
    *,
    weights: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write a drafter; `weights` replaces the tensors, `metadata` adds to or replaces keys, None takes one away."""
    tensors = assistant_weights(pair) if weights is None else weights
    keys = assistant_metadata(pair) | (metadata or {})
    kept = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(
        path, kept, [(name, "F32", each) for name, each in tensors.items()], arch=ARCH
    )
