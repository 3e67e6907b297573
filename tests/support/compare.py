"""How far two results may lie apart: one measure, and the one table of tolerances.

Loosening a tolerance is a decision that needs a record in docs/decisions. Knows no model and no oracle.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

_FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "mixed")

TOLERANCES = MappingProxyType(
    {
        # transformers' float32 model, holding the very values that the file's weights decode to. Both
        # sides compute in float32 (ours: reference kernels, or native ones from plain weights), so that
        # only the order of additions differs: 1e-13 is measured.
        **dict.fromkeys((f"transformers/{name}" for name in _FORMATS), 1e-10),
        # The same with native kernels from quantised weights, which round the activations of each product
        # to int8 (docs/decisions/0007), on models where that changes no choice of experts: 7e-5 to
        # 1.2e-4 measured.
        "transformers/int8 activations": 5e-4,
        # llama.cpp on a float32 file of the decoded values: as above.
        "llama.cpp/F32": 1e-10,
        # llama.cpp looks GELU up in a table of halves: 2e-7 measured, where transformers gives 1e-13.
        "llama.cpp/F32 and GELU": 2e-6,
        # Where it attends sparsely, llama.cpp rounds keys and values of other layers to halves: 7e-7 measured.
        "llama.cpp/F32 and halves": 2e-6,
        # llama.cpp on the same file rounds the activations of each product to the type that goes with
        # the weights; ours stay float32 for plain weights, and get a scale per 16 or 32 columns else. One rounding's share of the power (bits after the point for
        # floats; largest of 32 or 256 values over 127 steps for int8) goes through about eight
        # products one after the other; measured shares of the logits are given.
        "llama.cpp/F16": 1e-5,  # to F16: 1e-7 a product; 1e-6 measured
        "llama.cpp/BF16": 5e-4,  # to BF16: 5e-6 a product; 7e-5 measured
        "llama.cpp/Q8_0": 1e-3,  # to int8 in blocks of 32: 2e-5 a product; 1e-4 measured
        "llama.cpp/Q4_0": 1e-3,
        "llama.cpp/Q4_K": 3e-3,  # to int8 in blocks of 256: 5e-5 a product; 5e-4 measured
        "llama.cpp/Q5_K": 3e-3,
        "llama.cpp/Q6_K": 3e-3,
        "llama.cpp/mixed": 3e-3,
        "llama.cpp/any type": 3e-3,  # 2e-4 to 3e-4 measured of most
        # Native kernels against the reference ones, whole models: as with transformers.
        "reference/float32": 1e-10,
        # With a cache of halves and prompts on tiles (docs/decisions/0111); 1.2e-10 measured.
        "reference/16-bit attention": 1e-9,
        "reference/int8 activations": 5e-4,
        # One product against the same in double, with the weights as the gguf package decodes them.
        # float32 activations: only the order of additions and the fusing differ.
        "product/float32": 1e-11,
        # Quantised weights, native: activations rounded to int8 with a scale per 16 or 32 columns
        # (docs/decisions/0007). 1e-5 to 3e-5 measured on normal activations.
        "product/int8 activations": 5e-5,
        # Attention against double, on the very numbers that the cache holds. With 16 bits (prompts on tiles, docs/decisions/
        # 0111): 2e-10 measured where scores differ by tens, 5e-10 where keys and values are made of latent rows;
        # rounding to a cache of halves alone takes 2e-8.
        "attention/float32": 1e-11,
        "attention/float32, packed cache": 1e-10,
        "attention/16 bits": 1e-9,
        # A whole expert, three such products one after the other: 9e-5 measured, a relative error of
        # 0.0095.
        "experts/int8 activations": 1e-4,
        # Non-expert weights on a device (torch, or Triton for products from blocks). float32 throughout: only the order
        # of additions differs. 1e-14 to 3e-12 measured, whole models among them.
        "non-expert/float32": 1e-10,
        # One product with both operands rounded to bfloat16 (prompts from blocks; formats that are
        # expanded, where the result is rounded as well): 1e-6 to 4e-6 measured on normal weights, 1.2e-5
        # on blocks of random bytes, whose sums cancel.
        "non-expert/bfloat16": 2e-5,
        # Whole models with quantised weights, non-expert weights on a device, experts by the reference kernels: prompts
        # round both operands of their products to bfloat16. 2e-5 to 1.1e-4 measured where that
        # changes no choice of experts, 1.5e-4 where it does; up to 7e-5 between one cut of a prompt into
        # chunks and another, since a last bit may round an operand the other way.
        "non-expert/whole models": 1e-3,
        # Attention in the type of the cache: queries, keys and softmax weights are halves (with Q8_0 the
        # dequantised keys, too), sums float32. 2e-7 measured; bfloat16 has three bits less.
        "non-expert/attention float16": 2e-6,
        "non-expert/attention bfloat16": 1e-4,
        # One instruction set against another: fusing alone differs, 1e-13 measured.
        "instruction sets": 1e-10,
        # In an expert a last bit may move an inner activation to the next of 127 steps.
        "instruction sets/experts": 1e-6,
        # On a device in float32, whole experts against the reference kernels: only the order of additions,
        # the fusing and the exponential differ; 4e-14 measured in Triton's interpreter.
        "device/float32": 1e-11,
        # On a device's matrix units: weights, activations and inner activations rounded to bfloat16, each
        # 3e-6 of the power; 2e-5 measured on whole experts with the rounding written out.
        "device/bfloat16": 5e-5,
        # The same against doubles of operands that were rounded so, TF32 cut off: an inner activation may be rounded
        # the other way.
        "device/rounded operands": 1e-5,
        # Whole toys whose experts square their activations, in prompts on a GPU (docs/decisions/0105): 0.0077 with the
        # rounding written out on the CPU, and the same on a GPU.
        "device/whole models that square": 2e-2,
    }
)
"""Largest allowed NMSE by "oracle/weight format"."""


def nmse(ours: np.ndarray, oracle: np.ndarray) -> float:
    """Return sum((ours - oracle)^2) / sum(oracle^2) in double; infinite where either is not finite."""
    assert ours.shape == oracle.shape, f"shapes differ: {ours.shape}, {oracle.shape}"
    a, b = np.asarray(ours, np.float64), np.asarray(oracle, np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    power = float(np.square(b).sum())
    error = float(np.square(a - b).sum())
    if power == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / power


def assert_within(ours: np.ndarray, oracle: np.ndarray, tolerance: str) -> None:
    """Fail unless the NMSE of `ours` is at most that of entry `tolerance` of the table."""
    found, allowed = nmse(ours, oracle), TOLERANCES[tolerance]
    assert found <= allowed, f"NMSE {found:.3g} exceeds {allowed:g} ({tolerance})"
