"""
CPU kernels over the bytes of a GGUF file; see kernels/cpu.py for the checked interface.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


interface: int = 36

class Core:
    """The threads and the instruction set that jobs run on."""

    def __init__(self, isa: str, threads: int, pin: bool = False) -> None: ...

    @property
    def isa(self) -> str: ...

    @property
    def threads(self) -> int: ...

    def unpack(self, type_id: int, raw: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], q: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], scale: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], minimum: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        raw as scale * (q - offset) - minimum; minimum is left alone where the type has none.
        """

    def read_all(self, bytes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """Read every byte once, with all threads; a checksum."""

    def multiply_in_cache(self, rounds: int) -> int:
        """
        Multiply-adds done on every thread without touching memory; time it for the limit.
        """

    def decode_rows(self, weight: Matrix, rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], may_be_missing: bool = False) -> None:
        """out[i] = row rows[i] of the weight, as float32."""

    def multiply_all(self, weights: Sequence[Matrix], x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], outs: Sequence[Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]], add: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, prompt: bool = False) -> None:
        """outs[i] = x times the transposed weights[i], plus `add`."""

    def expert_outputs(self, of: Experts, experts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], scale: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], prompt: bool = False, may_be_missing: bool = False) -> None:
        """
        out[pair] = scale * down(activation(gate(x[row]), up(x[row]))); counts[i] pairs chose experts[i].
        """

    def expert_sum(self, of: Experts, experts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], scale: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], pair_of: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], prompt: bool = False, may_be_missing: bool = False) -> None:
        """
        The pairs' outputs added up per token in slot order, plus the residual.
        """

    def rms_norm(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], epsilon: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """out = x / sqrt(mean(x^2) + epsilon) * gain, row by row."""

    def layer_norm(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, epsilon: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """The same of x - mean(x), row by row, plus the bias."""

    def rope_table(self, positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], frequencies: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], magnitude: float, cosines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], sines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """Cosines and sines of position * frequency, times magnitude."""

    def prepare_heads(self, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], k: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)] | None, v: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)] | None, q_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, k_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, epsilon: float, norm_last: bool, cosines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], sines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], pairs: bool, cache_type: int, block_tokens: int, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], values: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], v_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> None:
        """
        Norm and rotary embedding of q (in place) and k, norm of v, then k and v into their slots.
        """

    def attention(self, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_tables: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cache_type: int, block_tokens: int, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], scale: float, softcap: float, window: int, sinks: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, chunked: bool, temperature: Temperature | None, chosen: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)] | None, prompt: bool, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> None:
        """
        Causal attention of some sequences' tokens over their cached keys and values.
        """

    def route(self, logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], gating: int, logit_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, groups: int, groups_used: int, group_best: int, normalize: bool, min_sum: float, scale: float, given: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """The best experts of each token, or those given, and their weights."""

    def gate(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], gate: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], activation: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """out = x times the sigmoid (0), softplus (1) or gelu (2) of gate."""

    def add_normed(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], first: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], second: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], first_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, second_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, epsilon: float, scale: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        out = (x + norm(y)) * scale, where y is first, or norm(first) + norm(second).
        """

    def softcap(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], cap: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """out = cap * tanh(x / cap)."""

    def take_streams(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], base: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], floor: float, rounds: int, taken: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], rest: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], shares: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        What a part of a layer takes of several streams, the mixture that is left, and each stream's share.
        """

    def pool_rows(self, rows: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], gates: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], places: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        out = the sum over rows of the softmax of gates + places times rows, number by number.
        """

    def combine(self, residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], parts: Sequence[tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]]], slots: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        out = residual + ((slot 0 + slot 1) + ...), from (rows, slots, values) parts.
        """

    def delta_rule(self, rule: DeltaRule, mixed: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], z: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], alpha: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], beta: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], runs: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], conv_states: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], states: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        The gated delta rule over some sequences' tokens, whose states it moves on.
        """

    def short_convolution(self, rule: ShortConvRule, rows: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], runs: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], conv_states: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        A short convolution over some sequences' tokens, whose states it moves on.
        """

    def mamba(self, rule: MambaRule, rows: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], runs: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], conv_states: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], states: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """Mamba2 over some sequences' tokens, whose states it moves on."""

    def selective_convolution(self, rule: SelectiveRule, rows: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], runs: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], conv_states: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        What the first Mamba's convolution gives of some sequences' tokens; moves its states on.
        """

    def selective_scan(self, rule: SelectiveRule, rows: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], convolved: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], steps: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], keys: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], runs: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], states: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        The first Mamba behind its products, over some sequences' tokens, whose states it moves on.
        """

    def multiply_heads(self, weights: MatrixStack, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> None:
        """out[t, h] = x[t, h] times the transposed weights[h]."""

    def prepare_latent(self, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], kv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], epsilon: float, cosines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], sines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], cache_type: int, block_tokens: int, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Turns the last numbers of q's heads in place; the norm and rotary embedding of kv into its slots.
        """

    def index_scores(self, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], block_table: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cache_type: int, block_tokens: int, rows: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], step: int, clips: bool, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        out[t, n] = the sum over heads of weights[t] times max(0, q[t] . row n * step + step - 1), or the product itself.
        """

    def expanded_attention(self, k_up: MatrixStack, v_up: MatrixStack, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_tables: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cache_type: int, block_tokens: int, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], scale: float, temperature: Temperature | None, prompt: bool, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> None:
        """
        Causal attention over keys and values of heads, which are made of a latent cache's rows.
        """

    def latent_attention(self, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_tables: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cache_type: int, block_tokens: int, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], scale: float, softcap: float, window: int, sinks: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, chunked: bool, temperature: Temperature | None, prompt: bool, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> None:
        """
        Causal attention over a cache whose values are the first numbers of its keys.
        """

    def run_layer(self, layer: LayerWeights, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cosines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], sines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], pairs: bool, starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_tables: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cache_type: int, block_tokens: int, head_dim: int, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], values: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], prompt: bool, embedded: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, routed: RoutedCall | None = None) -> None:
        """
        Attention, routing and all chosen experts; their jobs are marked 0, 1 and 2. routed: called between the
        last two, on this thread; experts that are not in memory are then computed last.
        """

    def run_latent_layer(self, layer: LayerWeights, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cosines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], sines: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_tables: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], expanded: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cache_type: int, block_tokens: int, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], prompt: bool, routed: RoutedCall | None = None) -> None:
        """The same for a layer with latent attention."""

    def run_recurrent_layer(self, layer: LayerWeights, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], runs: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], conv_states: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], states: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], prompt: bool, routed: RoutedCall | None = None) -> None:
        """The same for a layer with recurrent state."""

    def run_plain_layer(self, layer: LayerWeights, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], prompt: bool, routed: RoutedCall | None = None) -> None:
        """The same for a layer without a mixer."""

    def busy_ns(self) -> list[int]:
        """How long each thread has worked on jobs so far; never waits for one."""

    def start_timeline(self, capacity: int) -> None:
        """
        Forget what was noted; note what each thread works on from now on, marked 0, up to `capacity` jobs
        between two calls of take_timeline.
        """

    def take_timeline(self, thread: int, out: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')]) -> int:
        """
        Rows of begin and end (ns of CLOCK_MONOTONIC) and mark to out [capacity, 3]; returns their number.
        """

class Matrix:
    """
    A weight [rows, cols] where it lies: uint8 [rows, bytes of a row], which it keeps alive. Its products are multiplied by `scale`.
    """

    def __init__(self, type_id: int, raw: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], scale: float = 1.0) -> None: ...

class MatrixStack:
    """
    One matrix per expert: uint8 [experts, rows, bytes of a row]. scales: float32 [experts], of their products.
    """

    def __init__(self, type_id: int, raw: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), device='cpu', writable=False)], scales: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None: ...

    @property
    def rows(self) -> int: ...

class Experts:
    """
    The experts of a layer: gate and up [experts, intermediate, hidden], down [experts, hidden, intermediate]. activation: the number of an ExpertActivation; biases: of gate, up and down, or of up and down, float32 [experts, 1, rows], or none. limits: of the activation, where it has them.
    """

    def __init__(self, gate: MatrixStack | None, up: MatrixStack, down: MatrixStack, activation: int, biases: Sequence[MatrixStack], limits: tuple[float, float] | None = None) -> None: ...

def instruction_sets() -> list[tuple[str, bool]]:
    """
    Name of each set of the build, narrowest first, and whether this machine has it.
    """

def emulated_sets() -> list[str]:
    """
    Sets that this machine can run only in the manner of a test: exact and slow.
    """

def set_codebook(type_id: int, table: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None:
    """Give a type its codebook, once per process."""

def unpack_info(type_id: int) -> tuple[int, int, bool, bool, int, int]:
    """
    (offset, group, has_minimum, seven_bits, block_elements, block_bytes) of a quantised type.
    """

class Temperature:
    """A factor on a token's scores that grows with its position."""

    def __init__(self, *, scale: float, length: int, offset: int) -> None: ...

class DeltaRule:
    """The numbers of a gated delta rule other than its products'."""

    def __init__(self, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int, tiled: bool, by_channel: bool, conv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], step_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], decay: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], epsilon: float, sigmoid_gate: bool, lower_bound: float) -> None: ...

class ShortConvRule:
    """The numbers of a short convolution other than its products'."""

    def __init__(self, conv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

class MambaRule:
    """The numbers of Mamba2 other than its products'."""

    def __init__(self, *, heads: int, head_dim: int, groups: int, state_dim: int, conv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], conv_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], step_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], decay: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], skip: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], epsilon: float) -> None: ...

class SelectiveRule:
    """The numbers of the first Mamba other than its products'."""

    def __init__(self, *, conv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], conv_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], step_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], decay: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], skip: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

class PostNorm:
    """A norm before the addition to the residual stream, for LayerWeights."""

    def __init__(self, *, gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], first_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, second_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, epsilon: float, scale: float) -> None: ...

class AttentionWeights:
    """Attention, for LayerWeights."""

    def __init__(self, *, norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], q: Matrix, k: Matrix | None, v: Matrix | None, output: Matrix, q_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, k_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, wide_q_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, wide_k_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, q_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, k_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, v_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, epsilon: float, norm_last: bool, scale: float, window: int, activation: int, gate_in_q: bool, gate: Matrix | None, sinks: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, output_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, v_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, post: PostNorm | None, chunked: bool, temperature: Temperature | None, centers: bool, norm_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, clip: float) -> None: ...

class DeltaWeights:
    """The gated delta rule, for LayerWeights."""

    def __init__(self, *, norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], mixed: Sequence[Matrix], z: Matrix, alpha: Matrix, beta: Matrix, output: Matrix, z_low: Matrix | None, alpha_low: Matrix | None, rule: DeltaRule) -> None: ...

class SelectiveWeights:
    """
    The first Mamba's products between its convolution and its scan, for RecurrentWeights.
    """

    def __init__(self, low: Matrix, keys: Matrix, queries: Matrix, steps: Matrix, low_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], key_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], query_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

class RecurrentWeights:
    """A short convolution, Mamba2 or the first Mamba, for LayerWeights."""

    def __init__(self, *, norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], epsilon: float, input: Matrix, output: Matrix, rule: ShortConvRule | MambaRule | SelectiveRule, products: SelectiveWeights | None) -> None: ...

class LatentWeights:
    """Latent attention, for LayerWeights."""

    def __init__(self, *, norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], low: Matrix | None, low_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, q: Matrix, kv: Matrix, kv_gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], k_up: MatrixStack, v_up: MatrixStack, output: Matrix, epsilon: float, scale: float, temperature: Temperature | None, gate: Matrix | None) -> None: ...

class RoutedExperts:
    """A router and its experts, for LayerWeights."""

    def __init__(self, *, router: Matrix, chosen: int, normalize: bool, min_sum: float, scale: float, gating: int, logit_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, groups: int, groups_used: int, group_best: int, experts: Experts, norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, experts_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, weighs_input: bool, down: Matrix | None, up: Matrix | None) -> None: ...

class SharedExpert:
    """The expert that every token takes, for LayerWeights."""

    def __init__(self, experts: Experts, gate: Matrix | None) -> None: ...

class EmbeddingWeights:
    """What a layer adds of its embeddings of tokens, for LayerWeights."""

    def __init__(self, *, gate: Matrix, up: Matrix, norm: PostNorm) -> None: ...

class LayerWeights:
    """The weights of a layer, for run_layer."""

    def __init__(self, *, attention: AttentionWeights | None, delta: DeltaWeights | None, recurrent: RecurrentWeights | None, latent: LatentWeights | None, norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, epsilon: float, routed: RoutedExperts | None, shared: SharedExpert | None, end: PostNorm | None, embedding: EmbeddingWeights | None, handed_on: int, centers: bool, norm_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> None: ...

class RoutedCall:
    """
    What run_layer calls, without arguments, between routing and the experts, when ids and weights are
    there, and the residual stream in `stream` [tokens, hidden].
    """

    def __init__(self, stream: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], call: object) -> None: ...

def count_experts(expert_ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], num_experts: int, out: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """
    Write the experts that some tokens chose, ascending, then how many tokens chose each; their number.
    """

def dispatch_pairs(expert_ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], owners: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')]) -> tuple[int, int, int, int, int, int]:
    """
    Write for each of three owners its experts, ascending, their counts, and the rows, slots and weights of its pairs by expert, then by token; the numbers of experts and pairs of each. owners: one for each expert.
    """

def count_choices(ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], layers: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], residency: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], num_tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> tuple[int, int]:
    """
    Add the choices [n, tokens, slots] of n layers to counts [layers, experts], and the tokens to num_tokens [layers]; how many of them had a slot in
    residency [layers, experts], and in how many layers all had.
    """

def receive_frame(fd: int, buffer: object, prefix: bytes, spin_ns: int) -> object:
    """
    Receive from a socket into buffer, looking for up to spin_ns nanoseconds. One whole frame whose header begins with prefix is (kind, request, body); else the bytes that came, 0 at the stream's end, or -errno.
    """

def pack_bfloats(values: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Round numbers to bfloat16, nearest even; a NaN stays one."""

def unpack_bfloats(packed: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Widen bfloat16 to float32."""

class PlacedLayer:
    """
    A layer with its cache or states, for steps through all layers; slots: a device's, for experts.
    """

    def __init__(self, weights: LayerWeights, slots: Experts | None, rope: int, places: int) -> None: ...

    def attends(self, cache_type: int, block_tokens: int, head_dim: int, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], values: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')]) -> None:
        """Set its cache; values are not looked at where attention is latent."""

    def recurs(self, conv_states: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], states: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')]) -> None:
        """Set its states."""

class WholeStep:
    """
    All layers of a model, for chunks of few tokens, as one job of the CPU.
    """

    def __init__(self, core: Core, layers: Sequence[PlacedLayer]) -> None: ...

    def run(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], ropes: Sequence[tuple[Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], bool]], places: Sequence[tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]]], runs: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], embedded: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)] | None, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu')], weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], spans: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        Compute a step, but for `embedded` [layers, tokens, width] as StepGraph.run takes it. ids, weights [layers
        with experts, tokens, chosen]; spans [layers, 2]: each layer's begin and end in ns of CLOCK_MONOTONIC.
        """

class HandoffPage:
    """
    Memory that a device and the CPU share for the experts of decode steps.
    """

    def __init__(self, layers: int, rows: int, chosen: int, hidden: int) -> None: ...

    @property
    def memory(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]:
        """All of it, uint8."""

    @property
    def layout(self) -> dict[str, int]:
        """Where each part begins, in bytes; see handoff.h."""

    def publish(self, layer: int, epoch: int, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], slots: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> int:
        """
        The device's side: hand over the pairs whose slot is below zero; their number.
        """

    def wait(self, layer: int, epoch: int, patience: tuple[int, int]) -> int:
        """
        The device's side: wait until the CPU has served the layer. 0: it has; 1: the step was given up; 2: it is
        now, after `patience`: nanoseconds for a CPU that does not compute, and for one that does.
        """

    def begin(self, epoch: int) -> None:
        """The device's side: say that it computes the step now."""

    def end(self, epoch: int) -> None:
        """The device's side: say that it is done."""

    def abort(self, epoch: int) -> None:
        """Give up a step, so that neither side waits any more."""

class HandoffServer:
    """The CPU's side of decode steps."""

    def __init__(self, core: Core, page: HandoffPage, layers: Sequence[LayerWeights]) -> None: ...

    def serve(self, rows: int, epoch: int, patience: tuple[int, int], spans: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')]) -> int:
        """
        Compute what the device publishes, layer after layer. Returns as `HandoffPage.wait`, and 3 for a page that
        makes no sense. spans [layers, 2]: when each layer was seen and served, in ns of CLOCK_MONOTONIC.
        """

    def finish(self, epoch: int, patience: tuple[int, int]) -> int:
        """Wait until the device is done; returns as `HandoffPage.wait`."""

class StepGraph:
    """A decode step through all layers, recorded as nodes."""

    def __init__(self, core: Core, page: HandoffPage, layers: Sequence[PlacedLayer], bytes_per_s: float) -> None: ...

    @property
    def num_nodes(self) -> int: ...

    def output(self, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """Copy x [rows, hidden] behind the last layer."""

    def run(self, epoch: int, patience: tuple[int, int], x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], ropes: Sequence[tuple[Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], bool]], places: Sequence[tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]]], runs: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], residency: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> int:
        """
        Compute a step; returns as `HandoffPage.wait`. ropes: (cosines, sines, pairs) by position; places: (slots,
        starts, block_tables, table_starts, expanded); runs [runs, 4] as for run_recurrent_layer, none without recurrent
        layers; residency int32 [layers, experts].
        """

    def spans(self, out: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        Of the last step: begin and end of each node in ns of CLOCK_MONOTONIC, its kind, its layer, and the pairs
        that it computed or waited for.
        """

def queue_copies(function: int, copies: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], stream: int) -> int:
    """
    Call a driver's function for each copy to a device, int64 [n, 3]: addresses there and here, and bytes. Its first error, or 0.
    """

class Inbox:
    """What other threads want of one thread, first in, first out."""

    def __init__(self, is_native: bool) -> None:
        """
        is_native: the thread lets go of the interpreter lock in this module alone.
        """

    def put(self, item: object | None) -> None:
        """Add an item. From any thread; never waits."""

    def take(self) -> object:
        """Remove and return the first item, waiting for one. From one thread."""

    def is_empty(self) -> bool:
        """Whether no item waits."""

class GuardedMap:
    """A mapped file whose bytes become zeros where they can not be read."""

    def __init__(self, mapping: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], fd: int) -> None: ...

    def change(self) -> int:
        """
        What happened to the file: 0 nothing, 1 bytes could not be read, 2 another size, 3 another mtime.
        """

    def release(self) -> None:
        """Guard no longer: the mapping goes."""

def give_back_scratch() -> None:
    """
    Give back what this thread keeps for jobs on the way; the next one takes what it needs.
    """

def resident_pages(mapping: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """How many of the pages that hold these bytes are in memory, or -errno."""

def pages_read_at_once(mapping: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """
    The same for a file of any owner, or -errno; reads the pages that are not, and waits for them.
    """

def fetch_pages(mapping: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], start: int, end: int) -> int:
    """
    Read the pages of mapping[start:end] into memory and wait for them; their bytes, or -errno.
    """

def fetch_huge_pages(mapping: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], start: int, end: int) -> int:
    """
    The same in huge pages of 2 MiB, neighbours too, where `allow_huge_pages` did; their bytes, or -errno.
    """

def allow_huge_pages(mapping: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], start: int, end: int) -> int:
    """
    Let missing pages of mapping[start:end] come in huge pages of 2 MiB; their bytes, or -errno.
    """

def release_pages(mapping: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], start: int, end: int) -> int:
    """Let go of the pages inside mapping[start:end]; their bytes, or -errno."""

def unmap_pages(mapping: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], start: int, end: int) -> int:
    """
    Use the pages inside mapping[start:end] no longer, so that they can be let go; their bytes, or -errno.
    """

def stop_read_ahead(mapping: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], start: int, end: int) -> int:
    """
    Let a missing page of mapping[start:end] come without its neighbours; their bytes, or -errno.
    """
