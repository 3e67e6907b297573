"""Bytes of a model's parts on a device, which stores some of them otherwise than the file. Pure.

Reads the tensor table and the dimensions, never tensor data.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from thermocline.kernels.gpu.formats import DEVICE_FORMATS
from thermocline.models.rope import RopeRule
from thermocline.models.spec import LayerKind
from thermocline.units import align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from thermocline.kv.cache import KVCacheSpec
    from thermocline.modelfile.layout import TensorInfo
    from thermocline.models.device.part import DevicePart
    from thermocline.models.sizes import ModelSizes
    from thermocline.models.spec import ModelSpec

_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
_ROLES: Final = ("gate_up", "gate", "up", "down")
_EXPERTS: Final = re.compile(rf"ffn_((?:{'|'.join(_ROLES)})_exps\.(?:weight|bias))")
# Loaded as float32 whatever the file has: routers, and what is no matrix.
_WIDE: Final = (
    *("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "shortconv.conv.weight"),
    *("ssm_conv1d.weight", "ssm_a", "ssm_d", "ssm_norm.weight"),
    *(f"ssm_conv1d_{part}.weight" for part in "qkv"),
)
_SCALES: Final = (".scale", ".input_scale")
PART_ALIGNMENT: Final = 16
"""Matrices of an expert begin at multiples of it: loads of 16 bytes do."""


@dataclass(frozen=True, slots=True)
class LayerOnDevice:
    """Bytes of one layer without its experts.

    rope: whose table all layers with an equal rule share. block, window_block: keys and values of one block, without and
    with a sliding window. state: one sequence's.
    """

    kind: LayerKind
    non_expert: int
    rope: RopeRule | None = None
    block: int = 0
    window_block: int = 0
    state: int = 0


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """Bytes on a device.

    layers: whose non-expert weights are there. head: 0 where it is elsewhere. experts: by layer of the model, one
    expert in its slot; 0 where a device's kernels do not read the layer's experts, or it has none. layouts: by layer, as
    in `LayerSizes`.
    """

    layers: tuple[LayerOnDevice, ...]
    head: int
    hidden_size: int
    num_experts: int
    experts: tuple[int, ...]
    layouts: tuple[str, ...]
    cpu_only: str = ""
    """See `ModelSpec`."""
    splits_blocks: bool = False
    """Whether keys and values of a block lie apart: experts can not have its memory while it is empty."""

    @property
    def non_expert(self) -> int:
        """The bytes of non-expert weights, without the embedding."""
        return self.head + sum(layer.non_expert for layer in self.layers)

    @property
    def position(self) -> int:
        """The bytes of a position in the rotary tables: cosines and sines of half of the dimensions each."""
        rules = {layer.rope for layer in self.layers if layer.rope is not None}
        return sum(4 * rule.num_dims for rule in rules)

    @property
    def block(self) -> int:
        """The bytes of a block of keys and values in all layers that keep all tokens."""
        return sum(layer.block for layer in self.layers)

    @property
    def window_block(self) -> int:
        """The bytes of a block in all layers with a sliding window."""
        return sum(layer.window_block for layer in self.layers)

    @property
    def state(self) -> int:
        """The bytes of one sequence's recurrent states."""
        return sum(layer.state for layer in self.layers)

    def of(self, part: DevicePart) -> DeviceSizes:
        """Return the sizes of a part of the whole model's non-expert weights, with all experts."""
        layers = tuple(self.layers[n] for n in part.layers)
        return replace(self, layers=layers, head=self.head if part.has_head else 0)

    @property
    def padding(self) -> int:
        """The bytes of a place of each kind for the rows that fill up a step: blocks of all layers, and states."""
        return self.block + self.window_block + self.state

    @property
    def by_layout(self) -> Mapping[str, int]:
        """The bytes of an expert of each layout that a device reads."""
        pairs = zip(self.layouts, self.experts, strict=True)
        return {layout: nbytes for layout, nbytes in pairs if nbytes}


def measure_device_sizes(
    tensors: Iterable[TensorInfo], spec: ModelSpec, sizes: ModelSizes, cache: KVCacheSpec
) -> DeviceSizes:
    """Return the sizes of the model that consists of `tensors`. sizes: the same model's, in the file."""
    table = {tensor.name: tensor for tensor in tensors}
    parts: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
    non_expert, head = [0] * spec.num_layers, 0
    for tensor in table.values():
        match = _LAYER.fullmatch(tensor.name)
        if match is None:
            head += _top_bytes(tensor, spec.output_norm, is_tied="output.weight" not in table)
            continue
        layer, name = int(match[1]), match[2]
        if layer >= spec.num_layers:
            continue
        role = _EXPERTS.fullmatch(name)
        if role is not None:
            parts[layer][role[1]] = tensor
        elif name == "attn_kv_b.weight" and f"blk.{layer}.attn_k_b.weight" not in table:
            non_expert[layer] += _both_up_bytes(tensor, spec)
        elif not name.endswith(_SCALES):
            non_expert[layer] += _bytes(tensor)
    layers = tuple(
        _layer(kind, nbytes, spec, cache, cache.block_tokens * heads.token_bytes(cache.type))
        for kind, nbytes, heads in zip(spec.layer_kinds, non_expert, spec.kv_shapes, strict=True)
    )
    experts = tuple(_slot_bytes(parts[n], spec.router.num_experts) for n in range(spec.num_layers))
    return DeviceSizes(
        layers,
        head,
        spec.hidden_size,
        spec.router.num_experts,
        experts,
        tuple(layer.layout for layer in sizes.layers),
        spec.cpu_only,
        any(heads.own_value_dim for heads in spec.kv_shapes),
    )


def slot_starts(part_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return where an expert's matrices begin in its slot, and where the last one ends."""
    starts, end = [], 0
    for nbytes in part_bytes:
        starts.append(align_up(end, PART_ALIGNMENT))
        end = starts[-1] + nbytes
    return (*starts, end)


def _top_bytes(tensor: TensorInfo, norm: str, *, is_tied: bool) -> int:
    """Return the bytes of a tensor of no layer: the head's; a tied head's matrix is the embedding table.

    norm: the name of the head's.
    """
    norms = norm, norm.removesuffix("weight") + "bias"
    if tensor.name in ("output.weight", "output.bias", *norms):
        return _bytes(tensor)
    return _bytes(tensor) if tensor.name == "token_embd.weight" and is_tied else 0


def _bytes(tensor: TensorInfo) -> int:
    is_wide = len(tensor.shape) < 2 or tensor.name.endswith(_WIDE)
    return 4 * math.prod(tensor.shape) if is_wide else tensor.nbytes


def _both_up_bytes(tensor: TensorInfo, spec: ModelSpec) -> int:
    """Return the bytes of attn_kv_b, whose keys `models.latent` turns into numbers; values stay as they are."""
    latent = spec.latent
    if latent is None:
        return _bytes(tensor)
    keys = spec.num_heads * latent.plain * latent.rank
    values = tensor.nbytes * latent.value_dim // (latent.plain + latent.value_dim)
    return values + keys * (4 if tensor.format.name == "F32" else 2)


def _slot_bytes(parts: Mapping[str, TensorInfo], num_experts: int) -> int:
    names = {part.format.name for part in parts.values()}
    if not parts or not names <= DEVICE_FORMATS:
        return 0
    sizes = []
    for kind in ("weight", "bias"):
        for role in _ROLES:
            tensor = parts.get(f"{role}_exps.{kind}")
            if tensor is not None:
                nbytes = tensor.nbytes // num_experts
                sizes += [nbytes // 2] * 2 if role == "gate_up" else [nbytes]
    return slot_starts(sizes)[-1]


def _layer(
    kind: LayerKind, non_expert: int, spec: ModelSpec, cache: KVCacheSpec, block: int
) -> LayerOnDevice:
    """Return a layer's bytes. block: those of one block of keys and values."""
    match kind:
        case LayerKind.RECURRENT:
            state = 0 if spec.state is None else spec.state.num_bytes
            return LayerOnDevice(kind, non_expert, state=state)
        case LayerKind.WINDOW:
            rope = None if spec.window is None else spec.window.rope
            if cache.window_blocks:
                return LayerOnDevice(kind, non_expert, rope, window_block=block)
            return LayerOnDevice(kind, non_expert, rope, block=block)
        case LayerKind.NONE:
            return LayerOnDevice(kind, non_expert)
        case LayerKind.ATTENTION:
            rope = RopeRule(spec.rotary_dims, spec.rope_base, spec.rope_scaling)
            return LayerOnDevice(kind, non_expert, rope, block=block)
