"""
CPU kernels over the bytes of a GGUF file; see kernels/cpu.py for the checked interface.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


interface: int = 3

def decode_rows(format: int, raw: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """out[i] = row rows[i] of the weight `raw`, as float32."""

def matmul(format: int, raw: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """out = x times the transposed weight `raw`."""

def expert_ffn(formats: tuple[int, int, int], gate: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], up: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], down: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], scale: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """out[i] = scale[i] * down(silu(gate(x[rows[i]])) * up(x[rows[i]]))."""

def will_need(mapping: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], start: int, end: int, piece_bytes: int) -> int:
    """
    Advise the pages of mapping[start:end] as needed soon; the bytes advised, or -errno.
    """

def dense_sets() -> list[str]:
    """Instruction sets of this machine, the widest first."""

class Dense:
    """The dense kernels of one instruction set, on threads of their own."""

    def __init__(self, set: str, threads: int) -> None: ...

    def rms_norm(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], epsilon: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """out = x / sqrt(mean(x^2) + epsilon) * gain, row by row."""

    def rope_table(self, positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], frequencies: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], magnitude: float, cosines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], sines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """Cosines and sines of position * frequency, times magnitude."""

    def prepare_heads(self, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], k: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], v: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], q_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, k_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, epsilon: float, cosines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], sines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], pairs: bool, cache_type: int, block_tokens: int, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], values: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Norm and rotary embedding of q (in place) and k, then k and v into their slots.
        """

    def attention(self, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_tables: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cache_type: int, block_tokens: int, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], scale: float, softcap: float, window: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> None:
        """
        Causal attention of some sequences' tokens over their cached keys and values.
        """

    def route_softmax(self, logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], normalize: bool, min_sum: float, scale: float, ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """The best experts of each token, and their weights."""

    def combine(self, residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], parts: Sequence[tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]]], slots: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        out = residual + ((slot 0 + slot 1) + ...), from (rows, slots, values) parts.
        """
