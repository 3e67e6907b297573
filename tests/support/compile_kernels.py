"""Compiles the device's kernels for real GPUs, without one: a program of its own, since Triton interprets elsewhere.

Prints each kernel with its formats, its target and its shared memory. Knows the kernels' arguments. With "all" every
kernel is compiled for every target and every format for three of them, else each kernel for one.
"""

from __future__ import annotations

import sys
from itertools import cycle, product
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.support.device_rows import dequantize_kernel
from thermocline.kernels.dense_contract import Gating
from thermocline.kernels.gpu.attention import NUM_SPLITS, TileSizes
from thermocline.kernels.gpu.expert_ffn import DECODE, PROMPT, TileForm
from thermocline.kernels.gpu.formats import DEVICE_FORMATS, WIDE_FORMATS
from thermocline.kernels.gpu.gather_combine import gather_combine_kernel
from thermocline.kernels.gpu.handoff_kernels import (
    flag_kernel,
    publish_kernel,
    shared_combine_kernel,
    wait_kernel,
)
from thermocline.kernels.gpu.paged_tiles import (
    NUMBERS,
    attend_splits_kernel,
    attend_tiles_kernel,
    merge_splits_kernel,
)
from thermocline.kernels.gpu.routing_kernels import choose_kernel, slots_kernel
from thermocline.kernels.gpu.row_kernels import rms_norm_kernel, turn_kernel
from thermocline.kernels.gpu.tile_schedule import tile_schedule_kernel
from thermocline.kernels.weight import ExpertActivation
from thermocline.modelfile.formats import FORMATS_BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

HIDDEN, INTERMEDIATE = 2048, 768
_ACTIVATIONS = tuple(ExpertActivation)
# Turing, Ampere (A100, consumers'), Ada, Hopper, Blackwell (consumers').
TARGETS = (75, 80, 86, 89, 90, 120)
# Those that every format is compiled for.
FORMAT_TARGETS = (80, 90, 120)
# Two formats at a time: most of a compilation's time is not the format's.
_PAIRS = (
    *(("Q2_K", "Q3_K"), ("IQ1_M", "IQ2_XXS"), ("IQ3_S", "NVFP4"), ("Q5_1", "TQ1_0")),
    *(("IQ4_XS", "MXFP4"), ("Q4_0", "Q5_K")),
)


class Case(NamedTuple):
    """A kernel, the types of its pointers and numbers, its constants, and how it is launched."""

    kernel: triton.JITFunction
    types: dict[str, str]
    constants: dict[str, object]
    num_warps: int = 4
    cache: str = ""
    num_stages: int = 1

    @property
    def formats(self) -> str:
        """Return the names of the block formats that it reads, or a dash; of attention, that of the cache."""
        if self.cache:
            return self.cache
        names = [
            self.constants[name] for name in ("fmt", "gate_fmt", "up_fmt") if name in self.constants
        ]
        return ",".join(map(str, names)) or "-"

    def compile(self, capability: int) -> int:
        """Return the bytes of shared memory that a program of the kernel, compiled for a target, takes."""
        names = self.kernel.arg_names
        aligned = {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in self.types.items()
            if (kind.startswith("*") or name.endswith("stride")) and name not in NUMBERS
        }
        signature = {name: self.types.get(name, "constexpr") for name in names}
        source = ASTSource(self.kernel, signature, self.constants, aligned)
        options = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=options)
        assert compiled.asm["cubin"]
        return compiled.metadata.shared


def row_bytes(format_name: str, cols: int) -> int:
    """Return the bytes of a row."""
    return FORMATS_BY_NAME[format_name].row_bytes(cols)


def gate_up(form: TileForm, gate: str, up: str, pairs: int, operand: str) -> Case:
    """Gate and up of Qwen3-30B-A3B's size."""
    pointers = {"inner_ptr": operand, "x_ptr": operand, "gate_scale_ptr": "*fp32"}
    blocks = ("gate_ptr", "up_ptr", "gate_codebook_ptr", "up_codebook_ptr")
    pointers |= dict.fromkeys(blocks, "*u8")
    pointers |= dict.fromkeys(("gate_bias_ptr", "up_bias_ptr"), "*fp32")
    numbers = {"tiles_ptr": "*i32", "rows_ptr": "*i32", "gate_stride": "i32", "up_stride": "i32"}
    numbers |= {"bias_stride": "i32", "gate_limit": "fp32", "up_limit": "fp32"}
    # Each format with one formula, and each formula with some.
    activation = _ACTIVATIONS[FORMATS_BY_NAME[gate].type_id % len(_ACTIVATIONS)]
    constants = {
        "gate_row_bytes": row_bytes(gate, HIDDEN),
        "up_row_bytes": row_bytes(up, HIDDEN),
        "num_rows": INTERMEDIATE,
        "cols": HIDDEN,
        "gate_fmt": gate,
        "up_fmt": up,
        "is_scaled": gate == "NVFP4",
        "activation": activation.name,
        "has_gate": activation.has_gate,
        "has_bias": activation is ExpertActivation.CLAMPED_SILU,
        "block_rows": form.block_rows,
        "num_pairs": pairs,
    }
    return Case(form.gate_up, pointers | numbers, constants, form.num_warps)


def down(form: TileForm, name: str, pairs: int, operand: str) -> Case:
    """Down of the same."""
    types = {"out_ptr": "*fp32", "inner_ptr": operand, "down_ptr": "*u8", "tiles_ptr": "*i32"}
    types |= {"codebook_ptr": "*u8", "scale_ptr": "*fp32", "down_stride": "i32"}
    types |= {"bias_ptr": "*fp32", "bias_stride": "i32"}
    constants = {
        "row_bytes": row_bytes(name, INTERMEDIATE),
        "num_rows": HIDDEN,
        "cols": INTERMEDIATE,
        "fmt": name,
        "has_bias": name == "MXFP4",
        "block_rows": form.block_rows,
        "num_pairs": pairs,
    }
    return Case(form.down, types, constants, form.num_warps)


def _dequantize(name: str) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of the tests' own kernel, which decodes rows."""
    pointers = {"out_ptr": "*fp32", "raw_ptr": "*u8", "codebook_ptr": "*u8", "rows_ptr": "*i32"}
    constants = {"row_bytes": row_bytes(name, HIDDEN), "cols": HIDDEN, "fmt": name}
    return pointers | {"num_rows": "i32"}, constants | {"block_rows": 16}


def every_format() -> Iterator[Case]:
    """Every format in both arithmetics, with one pair and with full tiles."""
    for name in sorted(DEVICE_FORMATS):
        operand = "*fp32" if name in WIDE_FORMATS else "*bf16"
        yield gate_up(DECODE, name, name, 2, "*fp32")
        yield down(DECODE, name, 1, "*fp32")
        yield gate_up(PROMPT, name, name, 64, operand)
        yield down(PROMPT, name, 16, operand)


# Of the cache's numbers, and of what is multiplied: names of a format, of the numbers' pointers, and of products.
_CACHES = {
    "F32": ("*fp32", torch.float32, tl.float32),
    "F16": ("*fp16", torch.float16, tl.float16),
    "BF16": ("*bf16", torch.bfloat16, tl.bfloat16),
    "Q8_0": ("*i8", torch.float16, tl.float16),
}


def paged(
    name: str,
    head_dim: int,
    group: int,
    window: int,
    latent: int = 0,
    *,
    value_dim: int = 0,
    chunked: bool = False,
) -> Iterator[Case]:
    """Attention over a cache of this type: of prompts, of decoded tokens, and the sum of their splits.

    latent: numbers of a value that is part of its key. value_dim: where it is other than a key's. chunked: the window does
    not slide.
    """
    numbers, kind, operand = _CACHES[name]
    value_dim = latent or value_dim or head_dim
    form = TileSizes.of(kind, latent or max(head_dim, value_dim))
    units = "*fp16" if name == "Q8_0" else numbers
    types = dict.fromkeys(("out_ptr", "q_ptr", "sums_ptr", "tops_ptr", "sinks_ptr"), "*fp32")
    types |= dict.fromkeys(("keys_ptr", "values_ptr"), numbers)
    types |= dict.fromkeys(("key_units_ptr", "value_units_ptr"), units)
    types |= dict.fromkeys(NUMBERS[:3], "*i64") | dict.fromkeys(NUMBERS[3:], "i32")
    types |= {"length": "i32", "scale": "fp32"}
    constants = {
        "kv_heads": 2,
        "num_heads": 2 * group,
        "group": group,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "width": triton.next_power_of_2(value_dim),
        "rest_width": max(triton.next_power_of_2(head_dim - value_dim), 16),
        "is_latent": latent > 0,
        "block_tokens": 16,
        "window": window,
        "chunked": chunked,
        "is_quantised": name == "Q8_0",
        "operand": operand,
        "precision": "ieee" if kind is torch.float32 else "tf32",
        "positions": form.positions,
        "num_splits": NUM_SPLITS,
        "has_sinks": head_dim in (64, 192),
    }
    for kernel, block_rows in (
        (attend_tiles_kernel, form.rows),
        (attend_splits_kernel, form.heads(group)),
        (merge_splits_kernel, 0),
    ):
        given = constants | {"block_rows": block_rows}
        own = [
            {arg: value for arg, value in every.items() if arg in kernel.arg_names}
            for every in (types, given)
        ]
        cache = f"{'latent' if latent else 'cache'}:{name}"
        yield Case(kernel, *own, form.num_warps, cache, form.num_stages)


# Sizes of a head, and heads that share one of keys.
_HEADS = ((64, 4), (80, 1), (128, 8), (256, 8), (512, 8))


def every_cache() -> Iterator[Case]:
    """Every type of cache, with the heads of all architectures, with a window, and with one that does not slide."""
    for name, (head_dim, group) in product(_CACHES, _HEADS):
        is_chunked = head_dim == 80
        window = 512 if head_dim == 128 or is_chunked else 0
        yield from paged(name, head_dim, group, window, chunked=is_chunked)
    for name in _CACHES:
        yield from paged(name, 576, 20, 0, latent=512)
        yield from paged(name, 192, 16, 128, value_dim=128)


def cases() -> Iterator[Case]:
    """Every kernel, and every way that formats are unpacked in one of them."""
    yield Case(dequantize_kernel, *_dequantize("BF16"))
    for formats in _PAIRS:
        yield gate_up(DECODE, *formats, 1, "*fp32")
    yield gate_up(DECODE, "Q4_K", "Q8_0", 2, "*fp32")
    yield down(DECODE, "Q6_K", 2, "*fp32")
    yield gate_up(PROMPT, "Q4_K", "Q4_K", 64, "*bf16")
    yield down(PROMPT, "F16", 64, "*fp32")
    yield down(PROMPT, "F32", 64, "*fp32")
    yield down(PROMPT, "IQ2_S", 64, "*bf16")
    pointers = dict.fromkeys(("out_ptr", "outputs_ptr", "residual_ptr"), "*fp32")
    constants = {"hidden": HIDDEN, "num_slots": 8, "block": 1024}
    yield Case(gather_combine_kernel, pointers | {"pair_of_ptr": "*i32"}, constants)
    pointers = dict.fromkeys(("tiles_ptr", "slots_ptr", "counts_ptr"), "*i32")
    types = pointers | dict.fromkeys(("num_experts", "num_tiles"), "i32")
    constants = {"tile_pairs": 64, "block_experts": 256, "block_tiles": 32}
    yield Case(tile_schedule_kernel, types, constants)
    yield from paged("Q8_0", 128, 8, 512)
    yield from shared_steps()
    yield from rows()
    yield from routing()


def routing() -> Iterator[Case]:
    """Each gating, with and without what is added to it; few pairs and their slots."""
    types = dict.fromkeys(("weights_ptr", "logits_ptr", "bias_ptr", "logit_bias_ptr"), "*fp32")
    types |= {"ids_ptr": "*i64", "min_sum": "fp32", "scale": "fp32"}
    for gating in Gating:
        sizes = {"experts": 100, "chosen": 6, "block": 128, "block_chosen": 8}
        rule = {"gating": gating.name, "normalize": gating is not Gating.SOFTMAX_CHOSEN}
        has_bias = gating in (Gating.SIGMOID, Gating.SQRT_SOFTPLUS)
        rule |= {"has_bias": has_bias, "has_logit_bias": gating is Gating.SOFTMAX}
        rule |= {"near_range": 0.02}
        yield Case(choose_kernel, types, sizes | rule, 1)
    types = dict.fromkeys(("slots_ptr", "counts_ptr", "rows_ptr", "pair_of_ptr"), "*i32")
    types |= {"table_ptr": "*i32", "ids_ptr": "*i64", "num_live_ptr": "*i64", "num_pairs": "i32"}
    yield Case(slots_kernel, types, {"chosen": 8, "block": 64}, 1)


def rows() -> Iterator[Case]:
    """Norms of a token and of a head, and both ways to turn a head."""
    pointers = ("out_ptr", "x_ptr", "gain_ptr", "bias_ptr")
    types = dict.fromkeys(pointers, "*fp32") | {"epsilon": "fp32"}
    for width, warps, *kind in (
        *((HIDDEN, 4, False, False), (80, 1, False, False)),
        *((HIDDEN, 4, True, False), (HIDDEN, 4, True, True)),
    ):
        sizes = {"width": width, "block": triton.next_power_of_2(width)}
        sizes |= dict(zip(("centers", "has_bias"), kind, strict=True))
        yield Case(rms_norm_kernel, types, sizes, warps)
    types = dict.fromkeys(("out_ptr", "x_ptr", "cosines_ptr", "sines_ptr"), "*fp32")
    for head_dim, half, pairs in ((128, 64, False), (80, 20, True)):
        sizes = {"head_dim": head_dim, "half": half, "pairs": pairs}
        sizes["block"] = triton.next_power_of_2(head_dim)
        yield Case(turn_kernel, types | {"heads": "i32"}, sizes, 1)


def shared_steps() -> Iterator[Case]:
    """What a device does in a step that it shares with the CPU."""
    flags = dict.fromkeys(
        ("flag_ptr", "abort_ptr", "epoch_ptr", "served_ptr", "busy_ptr", "num_cold_ptr"), "*i32"
    )
    floats = ("page_weights_ptr", "page_x_ptr", "weights_log_ptr", "x_ptr", "weights_ptr")
    numbers = ("published_ptr", "cold_ptr", "ids_log_ptr", "num_cold_ptr", "slots_ptr", "epoch_ptr")
    published = dict.fromkeys(floats, "*fp32") | dict.fromkeys(numbers, "*i32")
    published |= {"ids_ptr": "*i64", "num_live_ptr": "*i64"}
    own = {"interprets": False}

    def taken(kernel: triton.JITFunction, types: dict[str, str]) -> dict[str, str]:
        return {name: types[name] for name in kernel.arg_names if name in types}

    yield Case(flag_kernel, taken(flag_kernel, flags), own, 1)
    sizes = {"hidden": HIDDEN, "num_chosen": 8, "block_pairs": 64, "block": 2048}
    yield Case(publish_kernel, published, sizes | own, 8)
    looks = dict.fromkeys(("max_idle_looks", "max_busy_looks"), "i32")
    yield Case(wait_kernel, taken(wait_kernel, flags) | looks, own, 1)
    pointers = dict.fromkeys(("out_ptr", "outputs_ptr", "residual_ptr", "page_out_ptr"), "*fp32")
    pointers |= dict.fromkeys(("pair_of_ptr", "place_ptr", "num_cold_ptr"), "*i32")
    constants = {"hidden": HIDDEN, "num_slots": 8, "block": 1024}
    yield Case(shared_combine_kernel, pointers | {"num_live_ptr": "*i64"}, constants)


if __name__ == "__main__":
    if sys.argv[1:] == ["all"]:
        pairs = [*product(cases(), TARGETS), *product(every_format(), FORMAT_TARGETS)]
        pairs += product(every_cache(), TARGETS)
    else:
        pairs = list(zip(cases(), cycle(TARGETS)))
    for case, target in pairs:
        name, shared = case.kernel.fn.__name__, case.compile(target)
        sys.stdout.write(f"{name} {case.formats} {target} {shared}\n")
