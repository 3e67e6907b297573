"""Writes the demo model as GGUF with a mix of quantised formats, and reads it back into torch.

The mix is that of common Q4_K_M files (gate and up Q4_K, half of the down matrices Q6_K, output
Q6_K), with Q5_K and Q8_0 in the attention so that one small file exercises many kernels.
Usage: python -m scripts.demo_model.export WEIGHTS.pt MODEL.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from scripts.demo_model import corpus, vocabulary
from scripts.demo_model.model import DemoModel, Dims, NextTokenBlock
from scripts.kquants import quantize

if TYPE_CHECKING:
    from scripts.demo_model.vocabulary import Vocabulary

ARCHITECTURE = "qwen3moe"
TOP_NAMES = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.output": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "experts.router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps",
    "experts.up": "ffn_up_exps",
    "experts.down": "ffn_down_exps",
}
BLOCK_NAMES = {
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "norm": "nextn.shared_head_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    **{name: role for name, role in LAYER_NAMES.items() if not name.startswith("experts.")},
}
"""Of the block that guesses a further token."""
BLOCK_FORMAT = "Q4_K"
FORMATS = {
    "token_embd": "Q8_0",
    "output": "Q6_K",
    "attn_q": "Q5_K",
    "attn_k": "Q8_0",
    "attn_output": "Q5_K",
    "ffn_gate_exps": "Q4_K",
    "ffn_up_exps": "Q4_K",
}
FORMATS_BY_DEPTH = {"attn_v": ("Q5_K", "Q6_K"), "ffn_down_exps": ("Q4_K", "Q6_K")}


def tensor_name(parameter: str) -> str:
    """GGUF name of a parameter of DemoModel."""
    path = parameter.removesuffix(".weight")
    if not path.startswith("layers."):
        return f"{TOP_NAMES[path]}.weight"
    _, index, role = path.split(".", 2)
    return f"blk.{index}.{LAYER_NAMES[role]}.weight"


def format_name(name: str, num_layers: int) -> str:
    """Format in which the tensor `name` is stored; norms and routers stay F32."""
    role = name.split(".")[-2]
    if role in FORMATS_BY_DEPTH:
        layer = int(name.split(".")[1])
        eighth = num_layers // 8
        more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
        return FORMATS_BY_DEPTH[role][int(more)]
    return FORMATS.get(role, "F32")


def write_gguf(path: Path, model: DemoModel, words: Vocabulary) -> None:
    """Write the model; the same weights give the same bytes.

    The file appears whole or not at all: somebody may have the present one mapped.
    """
    unfinished = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(unfinished, ARCHITECTURE)
    _add_metadata(writer, model.dims)
    _add_tokenizer(writer, words)
    for parameter, value in model.state_dict().items():
        name = tensor_name(parameter)
        kind = format_name(name, model.dims.num_layers)
        weights = value.float().numpy()
        if kind == "F32":
            writer.add_tensor(name, weights)
        else:
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(weights, kind), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(path)


def replace_block(path: Path, out: Path, block: NextTokenBlock | None) -> Path:
    """Write the model at `path` with this block behind its last layer, or none; all else stays as it is, to the bit.

    Returns `out`. llama.cpp opens a file of this architecture only without a block.
    """
    reader = gguf.GGUFReader(path)
    layers, key = _read_dims(reader).num_layers, f"{ARCHITECTURE}.block_count"
    writer = gguf.GGUFWriter(out.with_name(out.name + ".part"), ARCHITECTURE)
    for field in reader.fields.values():
        if field.name in (key, f"{ARCHITECTURE}.nextn_predict_layers", "general.architecture"):
            continue
        if not field.name.startswith("GGUF."):
            kinds = field.types
            sub_type = kinds[-1] if len(kinds) > 1 else None
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=sub_type)
    writer.add_block_count(layers + (block is not None))
    if block is not None:
        writer.add_nextn_predict_layers(1)
    for tensor in reader.tensors:
        if not tensor.name.startswith(f"blk.{layers}."):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for parameter, value in ({} if block is None else block.state_dict()).items():
        name = f"blk.{layers}.{BLOCK_NAMES[parameter.removesuffix('.weight')]}.weight"
        weights = value.float().numpy()
        if weights.ndim == 1:
            writer.add_tensor(name, weights)
        else:
            raw = gguf.GGMLQuantizationType[BLOCK_FORMAT]
            writer.add_tensor(name, quantize(weights, BLOCK_FORMAT), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out.with_name(out.name + ".part").replace(out)


def _add_metadata(writer: gguf.GGUFWriter, dims: Dims) -> None:
    writer.add_name("thermocline demo")
    writer.add_description(
        "A tiny mixture of experts that answers questions about thermocline, trained from scratch"
    )
    writer.add_license("apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(dims.num_layers)
    writer.add_context_length(dims.context_tokens)
    writer.add_embedding_length(dims.hidden)
    writer.add_feed_forward_length(dims.expert_ff * dims.experts_used)
    writer.add_expert_feed_forward_length(dims.expert_ff)
    writer.add_expert_count(dims.num_experts)
    writer.add_expert_used_count(dims.experts_used)
    writer.add_head_count(dims.num_heads)
    writer.add_head_count_kv(dims.num_kv_heads)
    writer.add_key_length(dims.head_dim)
    writer.add_value_length(dims.head_dim)
    writer.add_rope_freq_base(dims.rope_base)
    writer.add_layer_norm_rms_eps(dims.norm_eps)
    writer.add_vocab_size(dims.num_tokens)


def _add_tokenizer(writer: gguf.GGUFWriter, words: Vocabulary) -> None:
    special = set(corpus.SPECIAL_TOKENS)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(words.tokens))
    writer.add_token_types([control if t in special else normal for t in words.tokens])
    writer.add_token_merges(list(words.merges))
    writer.add_eos_token_id(words.special_id(corpus.TURN_END))
    writer.add_pad_token_id(words.special_id(corpus.END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_chat_template(corpus.CHAT_TEMPLATE)


def read_gguf(path: Path) -> tuple[DemoModel, Vocabulary]:
    """Read a file that `write_gguf` wrote: its weights dequantised, and its vocabulary."""
    reader = gguf.GGUFReader(path)
    words = vocabulary.from_merges(_contents(reader, "tokenizer.ggml.merges"))
    model = DemoModel(_read_dims(reader))
    stored = {t.name: t for t in reader.tensors}
    state = {}
    for parameter, value in model.state_dict().items():
        tensor = stored[tensor_name(parameter)]
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        state[parameter] = torch.from_numpy(np.array(weights, np.float32)).view(value.shape)
    model.load_state_dict(state)
    return model, words


def _contents(reader: gguf.GGUFReader, key: str) -> Any:  # noqa: ANN401 (metadata has many types)
    field = reader.get_field(key)
    if field is None:
        raise KeyError(f"{key} is missing: the file was not written by write_gguf")
    return field.contents()


def _read_dims(reader: gguf.GGUFReader) -> Dims:
    def own(key: str) -> Any:  # noqa: ANN401 (metadata has many types)
        return _contents(reader, f"{ARCHITECTURE}.{key}")

    blocks = reader.get_field(f"{ARCHITECTURE}.nextn_predict_layers")
    return Dims(
        num_tokens=own("vocab_size"),
        num_layers=own("block_count") - (0 if blocks is None else blocks.contents()),
        hidden=own("embedding_length"),
        num_heads=own("attention.head_count"),
        num_kv_heads=own("attention.head_count_kv"),
        head_dim=own("attention.key_length"),
        num_experts=own("expert_count"),
        experts_used=own("expert_used_count"),
        expert_ff=own("expert_feed_forward_length"),
        rope_base=own("rope.freq_base"),
        norm_eps=own("attention.layer_norm_rms_epsilon"),
        context_tokens=own("context_length"),
    )


def main() -> None:
    """Export saved weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("gguf", type=Path)
    options = parser.parse_args()
    words = vocabulary.learn()
    model = DemoModel(Dims(num_tokens=len(words.tokens)))
    model.load_state_dict(torch.load(options.weights, weights_only=True))
    write_gguf(options.gguf, model, words)
    print(f"wrote {options.gguf}: {options.gguf.stat().st_size} bytes")


if __name__ == "__main__":
    main()
