"""Which type each tensor has: as llama.cpp's converter leaves it, and as its quantiser chooses for Q4_K_M.

From conversion/base.py (prepare_tensors) and src/llama-quant.cpp (tensor_allows_quantization,
llama_tensor_get_type, tensor_type_fallback). tests/oracle/test_published_models.py compares with a dry run of the
quantiser itself. Knows no model.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from benchmarks.synthetic_model import has_more_bits
from thermocline.modelfile.formats import FORMATS_BY_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.published_models.shape import Part

_FLOAT32: Final = (
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    *("ssm_conv1d.weight", "ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight"),
    "_norm.weight",
)
_MORE_BITS: Final = ("attn_v.weight", "attn_qkv.weight", "ffn_down")
_FALLBACK: Final = MappingProxyType({"Q4_K": "Q5_0", "Q6_K": "Q8_0"})
"""For rows that 256 does not divide; what 32 does not divide either becomes F16."""


def converted_type(name: str, shape: tuple[int, ...]) -> str:
    """Return the type in a file of the converter: BF16, or F32 for vectors, norms and routers."""
    is_float = len(shape) == 1 or name.endswith(_FLOAT32) or not name.endswith(".weight")
    return "F32" if is_float else "BF16"


def mxfp4_type(name: str, shape: tuple[int, ...]) -> str:
    """Return the type in published files of gpt-oss: experts in MXFP4 as the checkpoint has them, the rest in Q8_0."""
    if converted_type(name, shape) == "F32":
        return "F32"
    return "MXFP4" if "_exps." in name else "Q8_0"


def q4_k_m_types(tensors: Sequence[Part], num_blocks: int) -> dict[str, str]:
    """Return the types in a file that llama.cpp's quantiser made as Q4_K_M, without an importance matrix."""
    shapes = dict(tensors)
    # Value projections are counted among each other, fused ones too: some layers have none.
    values = [
        name
        for n in range(num_blocks)
        for name in (f"blk.{n}.attn_v.weight", f"blk.{n}.attn_qkv.weight")
        if name in shapes
    ]
    ranks = {name: rank for rank, name in enumerate(values)}
    is_tied = "output.weight" not in shapes
    found = {}
    for name, shape in tensors:
        if name in ranks:
            found[name] = _q4_k_m_type(name, shape, ranks[name], len(ranks))
        elif is_tied and name == "token_embd.weight":
            found[name] = _q4_k_m_type("output.weight", shape, 0, num_blocks)
        else:
            block = int(name.split(".")[1]) if name.startswith("blk.") else 0
            found[name] = _q4_k_m_type(name, shape, block, num_blocks)
    return found


def _q4_k_m_type(name: str, shape: tuple[int, ...], index: int, count: int) -> str:
    if converted_type(name, shape) == "F32":
        return "F32"
    wanted = "Q4_K"
    if name == "output.weight":
        # Its own rule: Q8_0 at once for rows that do not fit, which the fallback of Q6_K is too.
        wanted = "Q6_K"
    elif name.startswith("blk."):
        part = name.removeprefix("blk.").split(".", 1)[1]
        if part.startswith(_MORE_BITS) and has_more_bits(index, count):
            wanted = "Q6_K"
    return _fitting(wanted, shape[-1])


def _fitting(wanted: str, row_length: int) -> str:
    for name in (wanted, _FALLBACK[wanted]):
        if row_length % FORMATS_BY_NAME[name].block_elements == 0:
            return name
    return "F16"
