"""Writes small qwen3moe files with random weights: valid in every respect, made in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.gguf_files import write_gguf
from tests.support.known_files import write_known

if TYPE_CHECKING:
    from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ToyShape:
    """Dimensions and tensor types of a toy model. head_dim * heads differs from hidden on purpose."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    used: int = 2
    intermediate: int = 32
    context: int = 512
    rope_base: float = 10000.0
    rms_epsilon: float = 1e-6
    tied: bool = False
    formats: dict[str, str] = field(default_factory=dict)
    """Tensor type by role: embed, attn, gate_up, down, output; F32 where not named."""
    seed: int = 7
    router_gain: float = 2.0

    def format(self, role: str) -> str:
        """Type of the tensors of `role`."""
        return self.formats.get(role, "F32")


def byte_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Return tokens, types and merges: the 256 bytes, a few merges, three control tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    alphabet |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    tokens = [alphabet[byte] for byte in range(256)]
    merges = []
    for first, second in (("t", "h"), ("i", "n"), ("e", "r"), ("th", "e"), ("a", "n")):
        merges.append(f"{first} {second}")
        tokens.append(first + second)
    types = [1] * len(tokens) + [3] * 3
    return [*tokens, END_OF_TEXT, TURN_START, TURN_END], types, merges


def toy_weights(shape: ToyShape) -> dict[str, np.ndarray]:
    """Return the float32 tensors by GGUF name, drawn from `shape.seed`."""
    rng = np.random.default_rng(shape.seed)
    num_tokens = len(byte_vocabulary()[0])
    hidden, head_dim = shape.hidden, shape.head_dim

    def matrix(*dims: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(dims) * gain / np.sqrt(dims[-1])).astype(np.float32)

    def gain(length: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(length)).astype(np.float32)

    weights = {
        "token_embd.weight": matrix(num_tokens, hidden, gain=np.sqrt(hidden)),
        "output_norm.weight": gain(hidden),
    }
    if not shape.tied:
        weights["output.weight"] = matrix(num_tokens, hidden, gain=3.0)
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        weights |= {
            prefix + "attn_norm.weight": gain(hidden),
            prefix + "ffn_norm.weight": gain(hidden),
            prefix + "attn_q_norm.weight": gain(head_dim),
            prefix + "attn_k_norm.weight": gain(head_dim),
            prefix + "attn_q.weight": matrix(shape.heads * head_dim, hidden),
            prefix + "attn_k.weight": matrix(shape.kv_heads * head_dim, hidden),
            prefix + "attn_v.weight": matrix(shape.kv_heads * head_dim, hidden),
            prefix + "attn_output.weight": matrix(hidden, shape.heads * head_dim),
            prefix + "ffn_gate_inp.weight": matrix(shape.experts, hidden, gain=shape.router_gain),
            prefix + "ffn_gate_exps.weight": matrix(shape.experts, shape.intermediate, hidden),
            prefix + "ffn_up_exps.weight": matrix(shape.experts, shape.intermediate, hidden),
            prefix + "ffn_down_exps.weight": matrix(shape.experts, hidden, shape.intermediate),
        }
    return weights


def toy_metadata(shape: ToyShape) -> dict[str, Any]:
    """Return the metadata of a toy model, tokenizer included."""
    tokens, types, merges = byte_vocabulary()
    arch = "qwen3moe"
    return {
        "general.name": "toy",
        f"{arch}.block_count": shape.layers,
        f"{arch}.context_length": shape.context,
        f"{arch}.embedding_length": shape.hidden,
        f"{arch}.feed_forward_length": shape.intermediate * shape.used,
        f"{arch}.expert_feed_forward_length": shape.intermediate,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.attention.key_length": shape.head_dim,
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(shape.rms_epsilon),
        f"{arch}.rope.freq_base": float(shape.rope_base),
        f"{arch}.expert_count": shape.experts,
        f"{arch}.expert_used_count": shape.used,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index(TURN_END),
        "tokenizer.ggml.padding_token_id": tokens.index(END_OF_TEXT),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


_ROLES = {
    "hc_": "streams",
    "ple_key.": "attn",
    "ple_value.": "attn",
    "per_layer_token_embd": "layer_embed",
    "per_layer_model_proj": "layer_end",
    ".inp_gate.": "layer_end",
    ".proj.": "layer_end",
    "token_embd": "embed",
    "output.weight": "output",
    "attn_q.": "attn",
    "attn_k.": "attn",
    "attn_v.": "attn",
    "attn_output_a.": "latent",
    "attn_output": "attn",
    "attn_kv.": "attn",
    "compressor_kv.": "compressor",
    "compressor_gate.": "compressor",
    "ffn_gate_exps": "gate_up",
    "ffn_gate_up_exps": "gate_up",
    "attn_qkv.": "attn",
    "attn_gate.": "attn",
    "ssm_out": "attn",
    "ssm_in": "attn",
    "ssm_x.": "attn",
    "ssm_dt.": "steps",
    "shortconv.in_proj": "attn",
    "shortconv.out_proj": "attn",
    "ffn_up_exps": "gate_up",
    "ffn_down_exps": "down",
    "ffn_gate_shexp": "gate_up",
    "ffn_gate.": "gate_up",
    "ffn_up.": "gate_up",
    "ffn_down.": "down",
    "ffn_up_shexp": "gate_up",
    "ffn_down_shexp": "down",
    "attn_q_a.": "attn",
    "attn_q_b.": "attn",
    "attn_kv_a_mqa.": "attn",
    "indexer.attn_": "attn",
    "attn_k_b.": "latent",
    "attn_kv_b.": "latent",
    "attn_v_b.": "latent",
    "ssm_f_a.": "attn",
    "ssm_g_a.": "attn",
    "ssm_f_b.": "latent",
    "ssm_g_b.": "latent",
}


def tensor_format(shape: ToyShape, name: str) -> str:
    """Return the type in which tensor `name` is stored; norms, biases, scales and routers are always F32."""
    if name.endswith((".bias", "scale", "norm.weight")):
        return "F32"
    if name.endswith("tid2eid.weight"):
        return "I32"
    for part, role in _ROLES.items():
        if part in name:
            return shape.format(role)
    return "F32"


def write_toy_model(
    path: Path,
    shape: ToyShape | None = None,
    *,
    weights: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write a toy model; `weights` replaces the random ones, `metadata` adds to or replaces keys."""
    shape = shape or ToyShape()
    if weights is None and metadata is None:
        return write_known(path, shape, lambda place: _write(place, shape, toy_weights(shape), {}))
    return _write(path, shape, weights or toy_weights(shape), metadata or {})


def _write(
    path: Path, shape: ToyShape, weights: dict[str, np.ndarray], metadata: dict[str, Any]
) -> Path:
    tensors = [(name, tensor_format(shape, name), values) for name, values in weights.items()]
    return write_gguf(path, toy_metadata(shape) | metadata, tensors, arch="qwen3moe")
