"""How near a measured speed comes to what the machine allows, and which limit is the nearer one.

Pure arithmetic on measured rates and on a model's footprint. Knows no engine and measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from thermocline.kernels.machine_limits import MachineLimits
    from thermocline.models.footprint import Footprint

# Below half of both limits, time goes elsewhere: waiting, bookkeeping, or other programs.
_NEAR: Final = 0.5


@dataclass(frozen=True, slots=True)
class PhaseLoad:
    """The load of one phase on the machine. memory, compute: utilisation, where 1 is the limit.

    bytes_per_token: the bytes that one token reads.
    """

    phase: str
    tokens_per_s: float
    bytes_per_token: float
    read_bytes_per_s: float
    memory: float
    compute: float

    @property
    def bound(self) -> str:
        """The nearer limit, in words."""
        if max(self.memory, self.compute) < _NEAR:
            return "neither: waiting, bookkeeping or other programs"
        return "memory reads" if self.memory >= self.compute else "arithmetic"

    def __str__(self) -> str:
        rate = self.read_bytes_per_s / 1e9
        return (
            f"{format_bytes(round(self.bytes_per_token))} per token, {rate:.1f} GB/s: "
            f"{self.memory:.0%} of memory, {self.compute:.0%} of arithmetic; bound by {self.bound}"
        )


def decode_load(footprint: Footprint, limits: MachineLimits, tokens_per_s: float) -> PhaseLoad:
    """Return the load of decoding one token at a time; every token reads its weights."""
    nbytes = footprint.token_bytes or footprint.total_bytes
    weights = footprint.num_active_parameters or footprint.num_parameters
    return _load("decode", limits, tokens_per_s, nbytes, weights)


def prefill_load(
    footprint: Footprint,
    limits: MachineLimits,
    tokens_per_s: float,
    num_prompt_tokens: int,
    chunk_tokens: int,
) -> PhaseLoad:
    """Return the load of a prompt; each of its chunks reads all non-expert weights and, at most, all experts.

    The output matrix is left out of the arithmetic: it is used once per prompt. So is attention.
    """
    num_chunks = ceil_div(num_prompt_tokens, chunk_tokens)
    nbytes = footprint.total_bytes * num_chunks / num_prompt_tokens
    active = footprint.num_active_parameters or footprint.num_parameters
    return _load(
        "prefill", limits, tokens_per_s, nbytes, max(active - footprint.num_output_parameters, 0)
    )


def _load(
    phase: str, limits: MachineLimits, tokens_per_s: float, nbytes: float, weights: int
) -> PhaseLoad:
    rate = nbytes * tokens_per_s
    return PhaseLoad(
        phase,
        tokens_per_s,
        nbytes,
        rate,
        rate / limits.read_bytes_per_s,
        weights * tokens_per_s / limits.multiply_adds_per_s,
    )
