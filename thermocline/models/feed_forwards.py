"""Which layers have routed experts, and how wide shared ones are, as the tensors of a file say.

Converters write keys for the models that were published. Configurations may say more: single dense layers between routed
ones, or shared experts of another width. Knows no architecture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.modelfile.layout import without_padding

if TYPE_CHECKING:
    from thermocline.models.metadata import SpecReader
    from thermocline.models.spec import ModelSpec


def with_dense_layers(read: SpecReader, spec: ModelSpec) -> ModelSpec:
    """Return the dimensions with the layers that have a feed-forward instead of routed experts.

    Layers that the file says to be dense, or routed, and that lack those tensors stay what the file says: reading them
    names what is missing. Raises ModelFileError for experts that no layer has.
    """
    dense = frozenset(
        n for n in range(spec.num_layers) if _has(read, n, "ffn_up") and not is_routed(read, n)
    )
    routed = frozenset(n for n in range(spec.num_layers) if is_routed(read, n))
    found = (spec.dense_layers | dense) - routed
    if len(found) == spec.num_layers:
        raise read.bad("expert_count", "is above zero, and no layer has routed experts")
    if found == spec.dense_layers:
        return spec
    width = read.size("feed_forward_length") if found else 0
    is_first = found == frozenset(range(len(found)))
    return replace(
        spec,
        num_dense_layers=len(found) if is_first else 0,
        own_dense_layers=() if is_first else tuple(sorted(found)),
        dense_intermediate_size=width,
    )


def is_routed(read: SpecReader, block: int) -> bool:
    """Whether a block of the file has a router."""
    return _has(read, block, "ffn_gate_inp")


def shared_width(read: SpecReader, num_layers: int, stated: int) -> int:
    """Return the width of all shared experts together: that of the first layer's that has any, else what is stated."""
    for name in (f"blk.{n}.ffn_up_shexp.weight" for n in range(num_layers)):
        info = read.tensors.get(name)
        if info is not None and len(shape := without_padding(info.shape)) == 2:
            return shape[0]
    return stated


def _has(read: SpecReader, layer: int, part: str) -> bool:
    return f"blk.{layer}.{part}.weight" in read.tensors
