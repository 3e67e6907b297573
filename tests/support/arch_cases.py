"""The toy models of each architecture that oracles, golden files and schedules are held against."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.toy_archs import ToyArch


@dataclass(frozen=True)
class ArchCase:
    """A toy model by name."""

    name: str
    toy: ToyArch

    def __str__(self) -> str:
        return self.name


def _case(name: str, arch: str, **options: object) -> ArchCase:
    return ArchCase(f"{arch}_{name}", ToyArch(arch, **options))


ODD = {"hidden": 30, "heads": 3, "kv_heads": 3, "head_dim": 10, "experts": 5, "used": 3}

ARCH_CASES = (
    _case("default", "olmoe", kv_heads=4),
    _case("shared_heads", "olmoe", hidden=96, heads=6, kv_heads=2, rms_epsilon=1e-5, seed=11),
    _case("odd", "olmoe", **ODD, intermediate=19, seed=12),
    _case("tied_all_experts", "olmoe", kv_heads=4, tied=True, experts=6, used=6, seed=13),
    _case("one_expert", "olmoe", kv_heads=4, experts=1, used=1, seed=14),
    _case("default", "qwen2moe"),
    _case("odd", "qwen2moe", **ODD, intermediate=19, shared=23, seed=21),
    _case("tied_unbiased", "qwen2moe", biased=False, tied=True, seed=22),
    _case("one_expert", "qwen2moe", experts=1, used=1, kv_heads=1, seed=23),
    _case("lonely_experts", "qwen2moe", experts=64, used=1, intermediate=16, seed=24),
)

_MIX = {"embed": "Q8_0", "attn": "Q5_K", "gate_up": "Q4_K", "down": "Q6_K", "output": "Q6_K"}
_WIDE = {
    "hidden": 256,
    "intermediate": 256,
    "shared": 256,
    "head_dim": 64,
    "used": 3,
    "context": 96,
}

SCHEDULED_CASES = tuple(
    _case("mixed", arch, **_WIDE, formats=_MIX) for arch in ("olmoe", "qwen2moe")
)
"""A quantised model of each architecture, for schedules."""
