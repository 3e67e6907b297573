"""Weights on a device: which stay blocks, what each takes, and products with all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.compare import assert_within, nmse
from tests.support.devices import DEVICES, HAS_CUDA, IS_INTERPRETED
from tests.support.kernel_cases import FORMATS, exact_product, make_weight, tokens_of
from thermocline.kernels.gpu import weights as weights_module
from thermocline.kernels.gpu.formats import DEVICE_FORMATS
from thermocline.kernels.gpu.product import (
    block_product,
    head_products,
    naive_block_product,
    naive_head_products,
)
from thermocline.kernels.gpu.slots import SlotMatrix
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.kernels.gpu.weights import BlockHeads, BlockMatrix, MatrixLoader, PlainMatrix
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.weight import WeightStack

PLAIN = {"BF16", "F32"}


@pytest.fixture(params=DEVICES)
def streams(request):
    """A device, closed at the end."""
    with DeviceStreams.open(request.param) as opened, opened.computing():
        yield opened


def load(streams, weight, *, exact=False) -> PlainMatrix | BlockMatrix:
    return MatrixLoader(streams, ReferenceKernels().decode_rows).matrix(weight, exact=exact)


def product(streams, matrix, x, *, prompt) -> np.ndarray:
    return matrix.multiply(streams.upload(x), prompt=prompt).cpu().numpy()


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_every_format(streams, name, monkeypatch):
    """Decoding is exact with all but BF16; prompts round to bfloat16.

    Loaded a few rows at a time, since large matrices are.
    """
    monkeypatch.setattr(weights_module, "_AT_A_TIME", 2000)
    rng = np.random.default_rng(1)
    weight, x = make_weight(rng, name, 37, 512), tokens_of(rng, 5, 512)
    matrix, expected = load(streams, weight), exact_product(weight, x)
    decoded, prompt = (product(streams, matrix, x, prompt=is_prompt) for is_prompt in (False, True))
    assert_within(
        decoded, expected, "non-expert/bfloat16" if name == "BF16" else "non-expert/float32"
    )
    assert_within(prompt, expected, "non-expert/bfloat16")
    assert decoded.dtype == np.float32


@pytest.mark.parametrize("name", ["BF16", "F32", "IQ2_XXS", "NVFP4"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_matrix_with_a_scale_of_its_own(streams, name, exact):
    """Its products are multiplied by it, whether it stays blocks or not."""
    rng = np.random.default_rng(4)
    weight, x = make_weight(rng, name, 5, 256), tokens_of(rng, 3, 256)
    matrix = load(streams, replace(weight, scale=0.3), exact=exact)
    rounds = name == "BF16" and not exact
    for prompt in (False, True):
        found = product(streams, matrix, x, prompt=prompt)
        entry = "non-expert/bfloat16" if rounds or (prompt and not exact) else "non-expert/float32"
        assert_within(found, 0.3 * exact_product(weight, x), entry)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_matrix_takes_is_known_before(streams, name):
    """The bytes that planning counts, which are the file's, are those of the tensor."""
    weight = make_weight(np.random.default_rng(2), name, 8, 512)
    matrix = load(streams, weight)
    held = matrix.blocks.raw if isinstance(matrix, BlockMatrix) else matrix.numbers
    assert held.nbytes == weight.nbytes


@pytest.mark.parametrize("name", ["Q4_K", "BF16", "F16", "IQ2_XXS"])
def test_what_decides_between_experts_is_exact(streams, name):
    """A router is float32 whatever its type, for prompts as for answers."""
    rng = np.random.default_rng(3)
    weight, x = make_weight(rng, name, 9, 256), tokens_of(rng, 3, 256)
    matrix = load(streams, weight, exact=True)
    for prompt in (False, True):
        found = product(streams, matrix, x, prompt=prompt)
        assert_within(found, exact_product(weight, x), "non-expert/float32")


@pytest.mark.slow
@pytest.mark.skipif(not IS_INTERPRETED, reason="Triton does not interpret in this process")
@pytest.mark.parametrize(
    ("name", "cols"), [("Q4_K", 256), ("Q8_0", 96), ("F16", 40), ("NVFP4", 64)]
)
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_the_kernel_is_its_twin_in_the_interpreter(name, cols, tokens):
    """Tails of rows, columns and tokens, both arithmetics."""
    rng = np.random.default_rng(5)
    weight, x = make_weight(rng, name, 19, cols), torch.from_numpy(tokens_of(rng, tokens, cols))
    matrix = SlotMatrix(weight.format, torch.from_numpy(np.array(weight.raw))[None], cols)
    for prompt in (False, True):
        found = block_product(matrix, x, prompt=prompt, scale=0.3)
        twin = naive_block_product(matrix, x, prompt=prompt, scale=0.3)
        # The interpreter takes all in float32.
        entry = "non-expert/bfloat16" if prompt and name != "F16" else "non-expert/float32"
        assert_within(twin.numpy(), found.numpy(), entry)


def stack_of(rng, name: str, heads: int, rows: int, cols: int, *, scaled: bool):
    """Return the matrices of some heads, and what they are alone."""
    weights = [make_weight(rng, name, rows, cols) for _ in range(heads)]
    scales = rng.uniform(0.3, 2, heads).astype(np.float32) if scaled else None
    raw = np.stack([weight.raw for weight in weights])
    stack = WeightStack("heads", weights[0].format, raw, cols, scales)
    return stack, [weight if scales is None else stack[n] for n, weight in enumerate(weights)]


@pytest.mark.parametrize("name", ["F32", "BF16", "F16", "Q8_0", "NVFP4"])
@pytest.mark.parametrize("scaled", [False, True])
def test_every_head_has_a_matrix_of_its_own(streams, name, scaled):
    """Products of one and of several tokens with the matrices of some heads, in the bytes that the file has."""
    rng = np.random.default_rng(6)
    stack, alone = stack_of(rng, name, 3, 7, 64, scaled=scaled)
    matrices = MatrixLoader(streams, ReferenceKernels().decode_rows).heads(stack)
    held = matrices.blocks.raw if isinstance(matrices, BlockHeads) else matrices.numbers
    assert held.nbytes == stack.raw.nbytes
    for tokens in (1, 5):
        x = rng.standard_normal((tokens, 3, 64)).astype(np.float32)
        expected = np.stack(
            [weight.scale * exact_product(weight, x[:, n]) for n, weight in enumerate(alone)], 1
        )
        for prompt in (False, True):
            found = matrices.multiply(streams.upload(x), prompt=prompt).cpu().numpy()
            rounds = name == "BF16" or (prompt and name != "F32")
            entry = "non-expert/bfloat16" if rounds else "non-expert/float32"
            assert_within(found, expected, entry)


@pytest.mark.slow
@pytest.mark.skipif(not IS_INTERPRETED, reason="Triton does not interpret in this process")
@pytest.mark.parametrize(
    ("name", "cols", "heads", "tokens"), [("Q8_0", 96, 3, 3), ("F16", 40, 3, 1), ("F16", 40, 1, 5)]
)
def test_the_kernel_of_heads_is_its_twin_in_the_interpreter(name, cols, heads, tokens):
    """One head or several, with tails of rows and tokens, in both arithmetics; columns that are part of a longer row."""
    rng = np.random.default_rng(7)
    stack, _ = stack_of(rng, name, heads, 9, cols, scaled=True)
    matrix = SlotMatrix(stack.format, torch.from_numpy(stack.raw), cols)
    wide = torch.from_numpy(tokens_of(rng, tokens, heads * (cols + 7)))
    x, scales = wide.view(tokens, heads, -1)[..., :cols], torch.from_numpy(stack.scales)
    for prompt in (False, True):
        given = matrix, x, scales
        found = head_products(*given, prompt=prompt)
        twin = naive_head_products(*given, prompt=prompt)
        entry = "non-expert/bfloat16" if prompt and name != "F16" else "non-expert/float32"
        assert_within(twin.numpy(), found.numpy(), entry)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device can be used here")
@pytest.mark.parametrize("name", sorted(DEVICE_FORMATS - PLAIN))
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 17, 64, 130])
@pytest.mark.parametrize("prompt", [False, True])
def test_the_kernel_is_its_twin_on_a_gpu(name, tokens, prompt):
    """Every format, any number of tokens, and a token's bits do not depend on how many there are."""
    rng = np.random.default_rng(6)
    weight, x = make_weight(rng, name, 300, 768), tokens_of(rng, tokens, 768)
    with DeviceStreams.open("cuda") as streams, streams.computing():
        matrix = load(streams, weight)
        assert isinstance(matrix, BlockMatrix)
        found = product(streams, matrix, x, prompt=prompt)
        blocks = SlotMatrix(weight.format, matrix.blocks.raw.cpu(), weight.cols)
        twin = naive_block_product(blocks, torch.from_numpy(x), prompt=prompt).numpy()
        assert nmse(found, twin) <= (1e-6 if prompt else 1e-10)
        alone = product(streams, matrix, x[-1:], prompt=prompt)
        np.testing.assert_array_equal(alone, found[-1:])
