"""What a model's bytes are for: routed experts, non-expert weights, and what one token reads.

Pure arithmetic on the tensor table; reads no tensor data and knows no architecture beyond the common
names of GGUF tensors.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.modelfile.layout import TensorInfo
    from thermocline.models.router_rule import RouterRule

_BLOCK: Final = re.compile(r"blk\.(\d+)\.")
_ROUTED: Final = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down|gate_up)_exps\.(weight|bias)$")
_EMBEDDING: Final = "token_embd.weight"
_LAYER_EMBEDDINGS: Final = "per_layer_token_embd.weight"
_OUTPUT: Final = "output.weight"
_OF_NGRAMS: Final = ".ple_key."


class Role(StrEnum):
    """What a tensor is for."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    STATE = "recurrent state"
    STREAMS = "residual streams"
    NGRAMS = "n-grams"
    ROUTER = "router"
    SHARED = "shared experts"
    DENSE = "dense feed-forward"
    EXPERTS = "experts"
    OUTPUT = "output"
    NORM = "norms"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class FormatShare:
    """The tensors of one role that are stored in one format."""

    role: Role
    format: str
    num_tensors: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of one model.

    total_bytes       all tensors
    trunk_bytes       all but the routed experts and a table of n-grams: read for every token
    experts_bytes     the routed experts of all layers
    expert_bytes      one expert of each layer, by layer index; layers without experts count 0
    token_bytes       what one decoded token reads at least; None where the router is not known
    num_parameters    weights of all tensors
    num_active_parameters  weights that one token uses; None where the router is not known
    num_output_parameters  weights of the output matrix (the embedding's, where it is tied)
    shared_bytes      experts that every token takes; part of trunk_bytes
    ngram_bytes       a table of n-grams, of which a token takes a few rows
    formats           what is stored how, in the order of `Role`, the largest format first
    """

    total_bytes: int
    trunk_bytes: int
    experts_bytes: int
    expert_bytes: tuple[int, ...]
    token_bytes: int | None
    num_parameters: int
    num_active_parameters: int | None
    num_output_parameters: int
    formats: tuple[FormatShare, ...]
    shared_bytes: int = 0
    ngram_bytes: int = 0


def decoder_tensors(tensors: Iterable[TensorInfo], num_layers: int) -> tuple[TensorInfo, ...]:
    """Return the tensors without those of blocks after the first `num_layers`."""
    blocks = ((tensor, _BLOCK.match(tensor.name)) for tensor in tensors)
    return tuple(tensor for tensor, block in blocks if block is None or int(block[1]) < num_layers)


def measure_footprint(tensors: Iterable[TensorInfo], router: RouterRule | None) -> Footprint:
    """Return the sizes of the model that consists of `tensors`.

    router: how many of how many experts a token uses; None when nothing is known about it. A token
    reads the non-expert weights without the embedding table, of which it takes one row (all of it where the
    table is the output too), and its share of the routed experts.
    """
    table = tuple(tensors)
    routed = [tensor for tensor in table if _routed_layer(tensor) is not None]
    rest = [tensor for tensor in table if _routed_layer(tensor) is None]
    has_ngrams = any(_OF_NGRAMS in tensor.name for tensor in table)
    ngram_bytes = sum(
        tensor.nbytes for tensor in rest if has_ngrams and tensor.name == _LAYER_EMBEDDINGS
    )
    trunk_bytes = sum(tensor.nbytes for tensor in rest) - ngram_bytes
    experts_bytes = sum(tensor.nbytes for tensor in routed)
    num_rest, num_routed = _num_weights(rest), _num_weights(routed)
    token_bytes = num_active = None
    if router is not None:
        is_tied = all(tensor.name != _OUTPUT for tensor in table)
        looked_up = {_LAYER_EMBEDDINGS} if is_tied else {_LAYER_EMBEDDINGS, _EMBEDDING}
        lookups = [tensor for tensor in rest if tensor.name in looked_up]
        unread_bytes = sum(tensor.nbytes - tensor.row_bytes for tensor in lookups)
        unused = sum(_num_weights([tensor]) - tensor.shape[-1] for tensor in lookups)
        pairs = [
            (tensor, layer) for tensor in routed if (layer := _routed_layer(tensor)) is not None
        ]
        used_bytes = sum(router.used_of(tensor.nbytes, layer) for tensor, layer in pairs)
        num_used = sum(router.used_of(_num_weights([tensor]), layer) for tensor, layer in pairs)
        token_bytes = trunk_bytes + ngram_bytes - unread_bytes + used_bytes
        num_active = num_rest - unused + num_used
    return Footprint(
        total_bytes=trunk_bytes + experts_bytes + ngram_bytes,
        trunk_bytes=trunk_bytes,
        experts_bytes=experts_bytes,
        shared_bytes=sum(
            tensor.nbytes for tensor in rest if tensor_role(tensor.name) is Role.SHARED
        ),
        expert_bytes=_expert_bytes(table),
        token_bytes=token_bytes,
        ngram_bytes=ngram_bytes,
        num_parameters=num_rest + num_routed,
        num_active_parameters=num_active,
        num_output_parameters=_num_output_weights(table),
        formats=_format_shares(table),
    )


def tensor_role(name: str) -> Role:
    """Return what the tensor of this GGUF name is for."""
    for part, role in _ROLE_BY_PART:
        if part in name:
            return role
    return Role.OTHER


def _role_in(names: frozenset[str], name: str) -> Role:
    """Return what a tensor is for among `names`: attn_qkv feeds attention where its block has no state.

    Where a state has a convolution for each of queries, keys and values, all products of its block are named as attention's.
    """
    prefix, found, part = name.partition("attn_")
    role = tensor_role(name)
    if name == _LAYER_EMBEDDINGS and any(_OF_NGRAMS in other for other in names):
        return Role.NGRAMS
    if not found or role in (Role.NORM, Role.STREAMS):
        return role
    if f"{prefix}ssm_conv1d_q.weight" in names:
        return Role.STATE
    if part.startswith("qkv.") and f"{prefix}ssm_conv1d.weight" not in names:
        return Role.ATTENTION
    return role


_ROLE_BY_PART: Final = (
    ("token_embd.", Role.EMBEDDING),
    ("norm", Role.NORM),
    ("hc_", Role.STREAMS),
    (".ple_", Role.NGRAMS),
    ("ssm_", Role.STATE),
    ("shortconv.", Role.STATE),
    ("attn_qkv.", Role.STATE),
    ("attn_", Role.ATTENTION),
    ("indexer", Role.ATTENTION),
    ("_shexp.", Role.SHARED),
    ("ffn_gate_inp", Role.ROUTER),
    ("ffn_gate_tid2eid", Role.ROUTER),
    ("exp_probs_b", Role.ROUTER),
    ("_exps.", Role.EXPERTS),
    ("ffn_", Role.DENSE),
    (_OUTPUT, Role.OUTPUT),
)


def _routed_layer(tensor: TensorInfo) -> int | None:
    match = _ROUTED.match(tensor.name)
    return None if match is None else int(match[1])


def _num_weights(tensors: Iterable[TensorInfo]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _num_output_weights(table: tuple[TensorInfo, ...]) -> int:
    by_name = {tensor.name: math.prod(tensor.shape) for tensor in table}
    return by_name.get(_OUTPUT, by_name.get(_EMBEDDING, 0))


def _expert_bytes(tensors: Iterable[TensorInfo]) -> tuple[int, ...]:
    by_layer: defaultdict[int, int] = defaultdict(int)
    for tensor in tensors:
        if (block := _BLOCK.match(tensor.name)) is not None:
            is_expert = _routed_layer(tensor) is not None
            axes = 1 if tensor.name.endswith(".bias") else 2
            # Padded, perhaps.
            nbytes = tensor.nbytes // math.prod(tensor.shape[:-axes]) if is_expert else 0
            by_layer[int(block[1])] += nbytes
    return tuple(by_layer[layer] for layer in range(max(by_layer, default=-1) + 1))


def _format_shares(tensors: tuple[TensorInfo, ...]) -> tuple[FormatShare, ...]:
    names = frozenset(tensor.name for tensor in tensors)
    groups: defaultdict[tuple[Role, str], list[int]] = defaultdict(list)
    for tensor in tensors:
        groups[_role_in(names, tensor.name), tensor.format.name].append(tensor.nbytes)
    shares = [
        FormatShare(role, name, len(sizes), sum(sizes)) for (role, name), sizes in groups.items()
    ]
    order = tuple(Role)
    shares.sort(key=lambda share: (order.index(share.role), -share.total_bytes, share.format))
    return tuple(shares)
