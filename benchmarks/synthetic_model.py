"""Writes a GGUF file with the real shapes of a published model and random weights: usage
`python -m benchmarks.synthetic_model OUT.gguf`.

Owns the shapes, llama.cpp's rule of which tensor gets more bits, and the file's layout. The file is
written front to back with little memory; equal arguments give equal bytes.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import gguf
import numpy as np

from benchmarks.synthetic_blocks import DRAWABLE, Bytes, WeightSource
from thermocline.modelfile.formats import FORMATS_BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    _Row = tuple[Any, ...]

_MIXES: Final = MappingProxyType({"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")})
"""Mix -> (type of most tensors, type of the output and of those that get more bits)."""
_FILE_TYPES: Final = MappingProxyType(
    {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K_M": 15}
    | {"Q5_K_M": 17, "Q6_K": 18, "BF16": 32}
)
"""llama.cpp's number of the mix, for its reports only."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a mixture-of-experts model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    used: int
    intermediate: int
    vocabulary: int
    context: int
    rope_base: float
    architecture: str = "qwen3moe"
    hybrid: Hybrid | None = None


@dataclass(frozen=True, slots=True)
class Hybrid:
    """What a model of gated delta rule and gated attention has besides."""

    shared: int
    rotary: int
    interval: int
    key_heads: int
    value_heads: int
    state: int
    conv: int

    @property
    def channels(self) -> int:
        """Numbers of a token that go through the convolution."""
        return (2 * self.key_heads + self.value_heads) * self.state

    @property
    def values(self) -> int:
        """Numbers of a token's values."""
        return self.value_heads * self.state


SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "qwen3-30b-a3b": Shape(48, 2048, 32, 4, 128, 128, 8, 768, 151936, 40960, 1e6),
        "olmoe-1b-7b": Shape(
            16, 2048, 16, 16, 128, 64, 8, 1024, 50304, 4096, 1e4, architecture="olmoe"
        ),
        "qwen3.6-35b-a3b": Shape(
            40,
            2048,
            16,
            2,
            256,
            256,
            8,
            512,
            248320,
            262144,
            1e7,
            architecture="qwen35moe",
            hybrid=Hybrid(512, 64, 4, 16, 32, 128, 4),
        ),
        "mini": Shape(4, 512, 8, 2, 64, 16, 4, 256, 2048, 16384, 1e6),
        "tiny": Shape(2, 256, 4, 2, 64, 8, 2, 256, 512, 16384, 1e6),
    }
)
DEFAULT_LAYERS: Final = MappingProxyType(
    {"qwen3-30b-a3b": 8, "olmoe-1b-7b": 16, "qwen3.6-35b-a3b": 8, "mini": 4, "tiny": 2}
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written: shape in NumPy order; deviation None stands for a vector of `constant`."""

    name: str
    format: str
    shape: tuple[int, ...]
    deviation: float | None
    constant: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes in the file, padding not counted."""
        return FORMATS_BY_NAME[self.format].row_bytes(math.prod(self.shape))


def has_more_bits(layer: int, num_layers: int) -> bool:
    """Return whether attn_v and ffn_down of this layer get the larger type, by llama.cpp's rule.

    The first and the last eighth of the layers, and every third between.
    """
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def tensors_of(shape: Shape, layers: int, mix: str) -> Iterator[Tensor]:
    """Yield the tensors in the order in which they lie in the file. `mix`: Q4_K_M, or any type."""
    base, high = _MIXES.get(mix, (mix, mix))
    hidden, by_hidden = shape.hidden, shape.hidden**-0.5
    yield Tensor("token_embd.weight", base, (shape.vocabulary, hidden), 1.0)
    yield Tensor("output_norm.weight", "F32", (hidden,), None)
    yield Tensor("output.weight", high, (shape.vocabulary, hidden), by_hidden)
    for layer in range(layers):
        large = high if has_more_bits(layer, layers) else base
        is_recurrent = shape.hybrid is not None and (layer + 1) % shape.hybrid.interval != 0
        mixer = _recurrent if is_recurrent else _attention
        for name, form, dims, *rest in (
            *mixer(shape, base, large),
            *_feed_forward(shape, base, large),
        ):
            full_name = name if "." in name or name == "ssm_a" else f"{name}.weight"
            yield Tensor(f"blk.{layer}.{full_name}", form, dims, *rest)


def _attention(shape: Shape, base: str, large: str) -> tuple[_Row, ...]:
    hidden, by_hidden = shape.hidden, shape.hidden**-0.5
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    is_wide = shape.architecture == "olmoe"  # norms over all heads together
    q_norm, k_norm = (q_size, kv_size) if is_wide else (shape.head_dim, shape.head_dim)
    return (
        ("attn_norm", "F32", (hidden,), None),
        ("ffn_norm" if shape.hybrid is None else "post_attention_norm", "F32", (hidden,), None),
        ("attn_q_norm", "F32", (q_norm,), None),
        ("attn_k_norm", "F32", (k_norm,), None),
        ("attn_q", base, (q_size if shape.hybrid is None else 2 * q_size, hidden), by_hidden),
        ("attn_k", base, (kv_size, hidden), by_hidden),
        ("attn_v", large, (kv_size, hidden), by_hidden),
        ("attn_output", base, (hidden, q_size), q_size**-0.5),
    )


def _recurrent(shape: Shape, base: str, large: str) -> tuple[_Row, ...]:
    own, hidden, by_hidden = shape.hybrid, shape.hidden, shape.hidden**-0.5
    assert own is not None
    return (
        ("attn_norm", "F32", (hidden,), None),
        ("post_attention_norm", "F32", (hidden,), None),
        ("attn_qkv", large, (own.channels, hidden), by_hidden),
        ("attn_gate", base, (own.values, hidden), by_hidden),
        ("ssm_alpha", "F32", (own.value_heads, hidden), by_hidden),
        ("ssm_beta", "F32", (own.value_heads, hidden), by_hidden),
        ("ssm_conv1d", "F32", (own.channels, own.conv), 0.5),
        ("ssm_dt.bias", "F32", (own.value_heads,), None),
        ("ssm_a", "F32", (own.value_heads,), None, -0.1),
        ("ssm_norm", "F32", (own.state,), None),
        ("ssm_out", base, (hidden, own.values), own.values**-0.5),
    )


def _feed_forward(shape: Shape, base: str, large: str) -> tuple[_Row, ...]:
    hidden, inner, experts = shape.hidden, shape.intermediate, shape.experts
    by_hidden = hidden**-0.5
    routed: tuple[_Row, ...] = (
        ("ffn_gate_inp", "F32", (experts, hidden), by_hidden),
        ("ffn_gate_exps", base, (experts, inner, hidden), by_hidden),
        ("ffn_up_exps", base, (experts, inner, hidden), by_hidden),
        ("ffn_down_exps", large, (experts, hidden, inner), inner**-0.5),
    )
    if shape.hybrid is None:
        return routed
    width = shape.hybrid.shared
    return (
        *routed,
        ("ffn_gate_inp_shexp", "F32", (hidden,), by_hidden),
        ("ffn_gate_shexp", base, (width, hidden), by_hidden),
        ("ffn_up_shexp", base, (width, hidden), by_hidden),
        ("ffn_down_shexp", large, (hidden, width), width**-0.5),
    )


def write_metadata(path: Path, shape_name: str, *, mix: str = "Q4_K_M") -> Path:
    """Write the whole model's header, and a hole for its tensors: for what reads no more than the header."""
    layers = SHAPES[shape_name].layers
    tensors = tuple(tensors_of(SHAPES[shape_name], layers, mix))
    _write_header(path, shape_name, layers, mix, tensors)
    alignment = gguf.GGUF_DEFAULT_ALIGNMENT
    sizes = (path.stat().st_size, *(tensor.nbytes for tensor in tensors))
    os.truncate(path, sum(size + -size % alignment for size in sizes))
    return path


def write_model(
    path: Path,
    shape_name: str = "qwen3-30b-a3b",
    *,
    layers: int | None = None,
    mix: str = "Q4_K_M",
    skew: float = 0.0,
    seed: int = 7,
) -> Path:
    """Write the model and return its path.

    skew: deviation of the logarithm of each expert's gain in the router; 0 gives even routing.
    """
    shape = SHAPES[shape_name]
    num_layers = DEFAULT_LAYERS[shape_name] if layers is None else layers
    tensors = tuple(tensors_of(shape, num_layers, mix))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    _write_header(partial, shape_name, num_layers, mix, tensors, skew)
    source = WeightSource(seed)
    alignment = gguf.GGUF_DEFAULT_ALIGNMENT
    with partial.open("ab") as file:
        file.write(bytes(-file.tell() % alignment))
        for tensor in tensors:
            for piece in _content(tensor, source, skew, seed):
                file.write(piece.data)
            file.write(bytes(-tensor.nbytes % alignment))
    partial.rename(path)
    return path


def _content(tensor: Tensor, source: WeightSource, skew: float, seed: int) -> Iterator[Bytes]:
    if tensor.deviation is None:
        yield np.full(tensor.shape, tensor.constant, np.float32).view(np.uint8)
        return
    form = FORMATS_BY_NAME[tensor.format]
    pieces = source.chunks(tensor.name, form, math.prod(tensor.shape), tensor.deviation)
    if not skew or ".ffn_gate_inp." not in tensor.name:
        yield from pieces
        return
    router = np.concatenate([piece.copy() for piece in pieces]).view(np.float32)
    layer = int(tensor.name.split(".")[1])
    gains = np.exp(
        np.random.default_rng([seed, layer]).standard_normal((tensor.shape[0], 1)) * skew
    )
    yield (router.reshape(tensor.shape) * gains.astype(np.float32)).reshape(-1).view(np.uint8)


def _write_header(
    path: Path,
    shape_name: str,
    layers: int,
    mix: str,
    tensors: tuple[Tensor, ...],
    skew: float = 0.0,
) -> None:
    shape = SHAPES[shape_name]
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"synthetic {shape_name} {mix}" + (f" skew {skew:g}" if skew else ""))
    writer.add_block_count(layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    if shape.architecture == "olmoe":
        writer.add_feed_forward_length(shape.intermediate)
    else:
        writer.add_feed_forward_length(shape.intermediate * shape.used)
        writer.add_expert_feed_forward_length(shape.intermediate)
    if shape.hybrid is not None:
        _add_hybrid(writer, shape.hybrid)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    if mix in _FILE_TYPES:
        writer.add_file_type(_FILE_TYPES[mix])
    _add_vocabulary(writer, shape.vocabulary)
    for tensor in tensors:
        form = FORMATS_BY_NAME[tensor.format]
        # The writer wants the shape in bytes, and takes the weights' shape from the type.
        dims = (*tensor.shape[:-1], form.row_bytes(tensor.shape[-1]))
        kind = gguf.GGMLQuantizationType(form.type_id)
        if tensor.format == "F32":
            floats = np.dtype(np.float32)
            writer.add_tensor_info(tensor.name, tensor.shape, floats, tensor.nbytes)
        else:
            octets = np.dtype(np.uint8)
            writer.add_tensor_info(tensor.name, dims, octets, tensor.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _add_hybrid(writer: gguf.GGUFWriter, own: Hybrid) -> None:
    writer.add_expert_shared_feed_forward_length(own.shared)
    writer.add_full_attention_interval(own.interval)
    writer.add_rope_dimension_count(own.rotary)
    sections = [len(range(part, own.rotary // 2, 3)) for part in range(3)]
    writer.add_rope_dimension_sections([*sections, 0])
    writer.add_ssm_conv_kernel(own.conv)
    writer.add_ssm_state_size(own.state)
    writer.add_ssm_group_count(own.key_heads)
    writer.add_ssm_time_step_rank(own.value_heads)
    writer.add_ssm_inner_size(own.values)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """The 256 bytes, one merge (loaders refuse none), unused names, and one control token."""
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    tokens = [alphabet[byte] for byte in range(256)]
    tokens.append("th")
    tokens += [f"<unused {index}>" for index in range(len(tokens), size - 1)]
    tokens.append("<|endoftext|>")
    kinds = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.UNUSED] * (size - 258)
    kinds.append(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(size - 1)
    writer.add_bos_token_id(size - 1)
    writer.add_add_bos_token(False)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.synthetic_model", description=__doc__
    )
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument(
        "--layers",
        type=int,
        help="default: all of olmoe-1b-7b and of the small ones, 8 of the others",
    )
    parser.add_argument(
        "--type",
        dest="mix",
        choices=sorted({*_MIXES, *DRAWABLE}),
        default="Q4_K_M",
        metavar="TYPE",
        help="Q4_K_M (default), Q5_K_M, or one type for all matrices, such as Q8_0 or Q6_K",
    )
    parser.add_argument("--skew", type=float, default=0.0, help="uneven routing: try 0.5")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="the same as --shape tiny")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Write the file that the command line asks for."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    shape_name = "tiny" if options.quick else options.shape
    start = time.perf_counter()
    path = write_model(
        options.out,
        shape_name,
        layers=options.layers,
        mix=options.mix,
        skew=options.skew,
        seed=options.seed,
    )
    took = time.perf_counter() - start
    size = path.stat().st_size
    print(f"{path}: {size} bytes ({size / 2**30:.2f} GiB) in {took:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
