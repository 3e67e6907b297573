"""The toy models that are held against outside oracles: shapes that hurt, and every weight format.

Quantised tensors get random blocks: every bit pattern of the format but the scales is drawn freely,
which reaches codes that no quantiser would write, and is the same on every machine. Knows no oracle.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import gguf
import numpy as np

from tests.support.toy_model import (
    ToyShape,
    byte_vocabulary,
    tensor_format,
    toy_weights,
    write_toy_model,
)

if TYPE_CHECKING:
    from pathlib import Path

PROMPT_LENGTHS = (1, 7, 13, 63, 64, 65)
"""One token, small primes, and both sides of a power of two."""

LONGEST_PROMPT = PROMPT_LENGTHS[-1]

ANSWER_TOKENS = 64

MIN_LEAD = 2e-5
"""Logits by which the best token must lead the next for answers to be compared: ten times the noise."""


@dataclass(frozen=True)
class OracleCase:
    """A toy model, with the entry of the tolerance table that its weights fall under."""

    name: str
    shape: ToyShape
    format: str = "F32"

    @property
    def exact_kernels(self) -> str:
        """Kernels that compute from these weights without rounding the activations."""
        return "native" if self.format in ("F32", "F16", "BF16") else "reference"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _BlockLayout:
    """Where a block's float16 scales lie, and how wide its values spread for a scale of 1."""

    scale_at: int
    spread: float
    min_at: int | None = None
    min_factor: float = 0.0
    """The minimum's scale in units of the scale: the mean code, so that values centre on zero."""


_LAYOUTS = MappingProxyType(
    {
        "Q8_0": _BlockLayout(0, 73.9),
        "Q4_0": _BlockLayout(0, 4.6),
        "Q4_K": _BlockLayout(0, 258.0, 2, 7.5),
        "Q5_K": _BlockLayout(0, 527.0, 2, 15.5),
        "Q6_K": _BlockLayout(208, 1370.0),
    }
)

_ROLES = ("embed", "attn", "gate_up", "down", "output")


def _all(format_name: str) -> dict[str, str]:
    return dict.fromkeys(_ROLES, format_name)


def _float_cases() -> tuple[OracleCase, ...]:
    shapes = {
        "default": ToyShape(),
        "narrow_heads": ToyShape(hidden=96, heads=2, kv_heads=1, head_dim=16, seed=11),
        "one_kv_head": ToyShape(heads=6, kv_heads=1, head_dim=16, seed=12),
        "all_kv_heads": ToyShape(heads=3, kv_heads=3, head_dim=24, hidden=80, seed=13),
        "one_expert": ToyShape(experts=1, used=1, seed=14),
        "all_experts": ToyShape(experts=6, used=6, seed=15),
        "lonely_experts": ToyShape(experts=64, used=1, intermediate=16, seed=16, router_gain=4.0),
        "tied": ToyShape(tied=True, seed=17),
        "odd": ToyShape(
            layers=3,
            hidden=37,
            heads=3,
            kv_heads=3,
            head_dim=10,
            experts=5,
            used=3,
            intermediate=19,
            seed=28,
        ),
        "deep": ToyShape(layers=7, hidden=48, head_dim=8, seed=19),
        "long_rope_large_epsilon": ToyShape(
            rope_base=1_000_000.0, rms_epsilon=1e-2, head_dim=64, seed=20
        ),
    }
    return tuple(OracleCase(name, shape) for name, shape in shapes.items())


def _half_cases() -> tuple[OracleCase, ...]:
    return tuple(
        OracleCase(
            f"{name}_{label}",
            ToyShape(formats=_all(name), seed=seed, tied=label == "odd_tied", hidden=hidden),
            name,
        )
        for name, seed in (("F16", 21), ("BF16", 23))
        for label, hidden in (("default", 64), ("odd_tied", 37))
    )


def _block_cases() -> tuple[OracleCase, ...]:
    small = {"hidden": 96, "heads": 3, "kv_heads": 1, "head_dim": 32, "intermediate": 160}
    wide = {
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "intermediate": 256,
        "experts": 4,
    }
    cases = [
        OracleCase(name, ToyShape(formats=_all(name), seed=seed, **dims), name)
        for name, seed, dims in (
            ("Q8_0", 31, small),
            ("Q4_0", 32, small),
            ("Q4_K", 33, wide),
            ("Q5_K", 34, wide),
            ("Q6_K", 35, wide),
        )
    ]
    mixed = {"embed": "Q4_K", "attn": "Q8_0", "gate_up": "Q4_K", "down": "Q6_K", "output": "Q6_K"}
    cases.append(OracleCase("mixed", ToyShape(formats=mixed, seed=36, **wide), "mixed"))
    tied = {"embed": "Q6_K", "attn": "F16", "gate_up": "Q4_0", "down": "Q5_K"}
    cases.append(
        OracleCase("mixed_tied", ToyShape(formats=tied, tied=True, seed=37, **wide), "mixed")
    )
    return tuple(cases)


FLOAT_CASES = _float_cases()
HALF_CASES = _half_cases()
BLOCK_CASES = _block_cases()
ALL_CASES = FLOAT_CASES + HALF_CASES + BLOCK_CASES


def write_case(path: Path, case: OracleCase) -> Path:
    """Write the model of `case` and return its path; the same case gives the same weights."""
    weights = _weights(case.shape)
    write_toy_model(path, case.shape, weights=weights)
    _fill_blocks(path, case.shape, weights)
    return path


def _weights(shape: ToyShape) -> dict[str, np.ndarray]:
    """Return the toy weights; a tied model's layers speak louder, or it would repeat its last token."""
    weights = toy_weights(shape)
    if shape.tied:
        for name in weights:
            if "attn_output" in name or "ffn_down" in name:
                weights[name] *= np.float32(1.5 * np.sqrt(shape.hidden))
    return weights


def _fill_blocks(path: Path, shape: ToyShape, weights: dict[str, np.ndarray]) -> None:
    """Replace the quantised tensors of the model at `path` by random blocks of like spread."""
    rng = np.random.default_rng(shape.seed + 1000)
    places = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with path.open("r+b") as file:
        for name, values in weights.items():
            format_name = tensor_format(shape, name)
            if format_name not in _LAYOUTS:
                continue
            place = places[name]
            # Rounded, so that no machine's order of additions shows in the file.
            spread = float(f"{values.std(dtype=np.float64):.3g}")
            raw = _random_blocks(rng, format_name, place.n_elements, spread)
            assert raw.nbytes == place.n_bytes, name
            file.seek(place.data_offset)
            file.write(raw.tobytes())


def _random_blocks(
    rng: np.random.Generator, format_name: str, num_elements: int, spread: float
) -> np.ndarray:
    """Return uint8 [blocks, block_bytes] whose decoded values spread by about `spread`."""
    layout = _LAYOUTS[format_name]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format_name]]
    blocks = rng.integers(0, 256, (num_elements // elements, num_bytes), dtype=np.uint8)
    uneven = rng.integers(8, 25, len(blocks)) / 16.0
    scale = spread / layout.spread * uneven
    if layout.min_at is None:
        scale *= rng.choice((-1.0, 1.0), len(blocks))
    else:
        _put_scale(blocks, layout.min_at, scale * layout.min_factor)
    _put_scale(blocks, layout.scale_at, scale)
    return blocks


def _put_scale(blocks: np.ndarray, at: int, scale: np.ndarray) -> None:
    blocks[:, at : at + 2] = scale.astype(np.float16)[:, None].view(np.uint8)


def model_digest(path: Path) -> str:
    """Return the SHA-256 of all that the results depend on: dimensions, and tensors as stored."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    digest = hashlib.sha256()
    for name in sorted(reader.fields):
        if name.startswith(f"{arch}."):
            digest.update(f"{name}={reader.fields[name].contents()};".encode())
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.name):
        shape = [int(n) for n in tensor.shape]
        digest.update(f"{tensor.name}:{tensor.tensor_type.name}:{shape};".encode())
        digest.update(np.ascontiguousarray(tensor.data).tobytes())
    return digest.hexdigest()


def prompt_ids(length: int, seed: int = 5) -> list[int]:
    """Return `length` token ids of the toy vocabulary, control tokens among them."""
    rng = np.random.default_rng(seed)
    return [int(n) for n in rng.integers(0, len(byte_vocabulary()[0]), length)]
