"""Matrix products: one body of tests over the reference and every instruction set of the machine."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.kernel_cases import (
    FORMATS,
    IMPLEMENTATIONS,
    ISAS,
    PLAIN,
    REFERENCE,
    decoded,
    exact_product,
    expert_work,
    make_expert,
    make_weight,
    native,
    same_bits,
    tokens_of,
)
from thermocline.kernels.weight import Weight
from thermocline.modelfile.formats import FORMATS_BY_NAME

pytestmark = pytest.mark.usefixtures("guarded")
NO_ACCESS = 0  # PROT_NONE, which the mmap module does not name
COUNTS = [*range(1, 10), 17, 64, 257, 300]  # 256 tokens share one unpacking of the weights
FUSED = ("avx2", "avxvnni", "avx512")  # sets whose sums fuse multiply and add in one order


def tolerance(implementation, format_name: str) -> str:
    """The entry of the table for products with a weight of this type."""
    exact = implementation == REFERENCE or format_name in PLAIN
    return "product/float32" if exact else "product/int8 activations"


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_a_product_is_that_of_the_decoded_weight(implementation, format_name):
    """Close to the product in double with the gguf package's weights, for one token and for many; also with a rest."""
    rng = np.random.default_rng(1)
    kernels = implementation.make()
    has_rest = FORMATS_BY_NAME[format_name].block_elements <= 32
    for cols in (1024, *([704] if has_rest else [])):
        weight, x = make_weight(rng, format_name, 100, cols), tokens_of(rng, 19, cols)
        expected = exact_product(weight, x)
        entry = tolerance(implementation, format_name)
        assert_within(kernels.matmul(weight, x), expected, entry)
        alone = np.concatenate([kernels.matmul(weight, row[None]) for row in x])
        assert_within(alone, expected, entry)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_several_products_of_one_x_are_those_products(guarded, implementation):
    """Types of every form beside each other: each output is the single product's, to the bit."""
    rng = np.random.default_rng(2)
    kernels = implementation.make()
    names = ["Q4_K", "Q6_K", "F32", "Q8_0", "Q4_K", "Q2_K", "F16", "Q4_0"]
    weights = [make_weight(rng, name, 5 + 16 * i, 512) for i, name in enumerate(names)]
    x = tokens_of(rng, 5, 512)
    together = kernels.multiply_all(weights, x)
    assert guarded.used
    assert len(together) == len(weights)
    for weight, out in zip(weights, together, strict=True):
        assert same_bits(out, kernels.matmul(weight, x))
    assert kernels.multiply_all([], x) == ()


@pytest.mark.parametrize("format_name", ["Q4_K", "F32"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_what_is_added_is_added_after_the_product(implementation, format_name):
    """`add` is one float32 addition per element."""
    rng = np.random.default_rng(3)
    kernels, weight = implementation.make(), make_weight(rng, format_name, 37, 256)
    x, add = tokens_of(rng, 6, 256), tokens_of(rng, 6, 37)
    assert same_bits(kernels.matmul(weight, x, add), add + kernels.matmul(weight, x))


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_token_does_not_feel_its_neighbours(isa, format_name):
    """Alone or among others, whatever their number and that of the threads: the same bits."""
    rng = np.random.default_rng(4)
    weight, x = make_weight(rng, format_name, 53, 512), tokens_of(rng, max(COUNTS), 512)
    kernels = native(isa)
    alone = np.concatenate([kernels.matmul(weight, row[None]) for row in x])
    for count in COUNTS:
        for threads in (1, 2, 3):
            together = native(isa, threads).matmul(weight, x[-count:])
            assert same_bits(together, alone[-count:]), f"{count} tokens, {threads} threads"


def between_pages(raw, *, at_end):
    """Return a copy of an array that begins, or ends, at the edge of pages between two that nobody may read."""
    page = mmap.PAGESIZE
    inner = -(-raw.nbytes // page) * page
    memory = mmap.mmap(-1, inner + 2 * page)
    array = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for edge in (0, page + inner):
        assert libc.mprotect(ctypes.c_void_p(array.ctypes.data + edge), page, NO_ACCESS) == 0
    first = page + (inner - raw.nbytes if at_end else 0)
    copy = array[first : first + raw.nbytes].reshape(raw.shape)
    copy[...] = raw
    return copy


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_read_before_or_behind_a_matrix(isa, format_name, at_end):
    """A file's mapping may begin or end there. One token, two and many, whole spans and a rest: the bits of elsewhere."""
    rng = np.random.default_rng(23)
    has_rest = FORMATS_BY_NAME[format_name].block_elements <= 32
    for cols in (1024, *([192, 544] if has_rest else [])):
        weight, x = make_weight(rng, format_name, 48, cols), tokens_of(rng, 5, cols)
        weight = replace(weight, raw=between_pages(weight.raw, at_end=at_end))
        elsewhere = replace(weight, raw=weight.raw.copy())
        for count in (1, 2, 5):
            found, expected = (native(isa).matmul(each, x[:count]) for each in (weight, elsewhere))
            assert same_bits(found, expected), f"{cols} columns, {count} tokens"


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_one_and_two_tokens_have_the_bits_of_many(isa, format_name):
    """Whole strips and long rows, which one or two tokens may go through in another order; also with a rest of 32 or 192 columns, or with no more."""
    rng = np.random.default_rng(17)
    has_rest = FORMATS_BY_NAME[format_name].block_elements <= 32
    for cols in (256, 1280, 2816, *([192, 544, 704] if has_rest else [])):
        weight, x = make_weight(rng, format_name, 64, cols), tokens_of(rng, 7, cols)
        for threads in (1, 3):
            kernels = native(isa, threads)
            many = kernels.matmul(weight, x)
            for count in (1, 2):
                for start in (0, 5):
                    few = kernels.matmul(weight, x[start : start + count])
                    expected = np.ascontiguousarray(many[start : start + count])
                    assert same_bits(few, expected), f"{cols} columns, {count} tokens"


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_token_does_not_feel_its_neighbours_in_the_reference(format_name):
    """The same claim of the slow twin, at fewer sizes."""
    rng = np.random.default_rng(4)
    weight, x = make_weight(rng, format_name, 5, 256), tokens_of(rng, 9, 256)
    kernels = REFERENCE.make()
    alone = np.concatenate([kernels.matmul(weight, row[None]) for row in x])
    for count in (2, 9):
        assert same_bits(kernels.matmul(weight, x[:count]), alone[:count])


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_a_row_does_not_feel_its_neighbours(implementation, format_name):
    """A feature is computed alike wherever its row stands, whole strips of 16 rows or not."""
    rng = np.random.default_rng(5)
    kernels, weight = implementation.make(), make_weight(rng, format_name, 100, 512)
    x = tokens_of(rng, 3, 512)
    whole = kernels.matmul(weight, x)
    for start, end in [(0, 1), (7, 8), (1, 16), (15, 31), (16, 48), (3, 36), (67, 100), (99, 100)]:
        part = replace(weight, raw=weight.raw[start:end])
        assert same_bits(kernels.matmul(part, x), np.ascontiguousarray(whole[:, start:end]))


def largest_errors(implementation, weight: Weight, x: np.ndarray) -> np.ndarray:
    """What each element [tokens, rows] may be off by, whatever the numbers.

    int8 activations are off by half a step, of which at least 121 make the largest of 32.
    """
    w, x = np.abs(decoded(weight)), np.abs(x.astype(np.float64))
    rounding = np.float64(1e-5) * x
    if tolerance(implementation, weight.format.name) != "product/float32":
        tops = x.reshape(len(x), -1, 32).max(axis=2)
        rounding = rounding + np.repeat(tops, 32, axis=1) * 0.5 / 121
    return rounding @ w.T


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_odd_shapes(implementation, format_name):
    """Row counts around strips and panels; columns of one block, a few, and across spans of 256."""
    rng = np.random.default_rng(6)
    kernels = implementation.make()
    widths = {
        1: [1, 7, 255, 257],
        32: [32, 96, 256, 288, 2048 + 32],
        64: [64, 192, 256, 320, 2048 + 64],
        256: [256, 768],
    }[FORMATS_BY_NAME[format_name].block_elements]
    for cols in widths:
        for rows in (1, 15, 16, 17, 31, 33, 100):
            weight, x = make_weight(rng, format_name, rows, cols), tokens_of(rng, 5, cols)
            errors = np.abs(kernels.matmul(weight, x) - exact_product(weight, x))
            assert (errors <= largest_errors(implementation, weight, x)).all(), f"{rows} x {cols}"


# Where a block's float16 scales lie; MXFP4 has an exponent, and IQ1_M its scale in pieces.
SCALES_AT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


@pytest.mark.parametrize("format_name", [*SCALES_AT, "MXFP4"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_sums_of_the_largest_numbers_do_not_overflow(implementation, format_name):
    """Blocks of one byte throughout, which make every weight the largest or the smallest, times 1 and -1."""
    form, cols = FORMATS_BY_NAME[format_name], 512
    fills = np.array([0x00, 0xFF, 0x77, 0x88, 0x7F, 0x80] * 16, np.uint8)
    raw = np.repeat(fills[:, None], cols // form.block_elements * form.block_bytes, axis=1)
    blocks = raw.reshape(len(fills), -1, form.block_bytes)
    for at in SCALES_AT.get(format_name, ()):
        blocks[:, :, at : at + 2] = np.array([0.125], np.float16).view(np.uint8)
    if format_name == "MXFP4":
        blocks[:, :, 0] = 120
    weight = Weight("w", form, raw, cols)
    sign = np.where(np.arange(cols) % 3, np.float32(1), np.float32(-1))
    x = np.stack([np.ones(cols, np.float32), -np.ones(cols, np.float32), sign] * 3)
    expected = exact_product(weight, x)
    kernels = implementation.make()
    for count in (1, 2, 9):
        out = kernels.matmul(weight, x[:count])
        allowed = 1e-5 * np.abs(decoded(weight)).sum(axis=1)
        assert (np.abs(out - expected[:count]) <= allowed).all()


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_zeros_and_numbers_of_any_size(implementation, format_name):
    """A token of zeros gives zeros; tiny, huge and mixed magnitudes stay within their rounding."""
    rng = np.random.default_rng(7)
    kernels, weight = implementation.make(), make_weight(rng, format_name, 20, 512)
    x = tokens_of(rng, 7, 512)
    x[0] = 0
    x[1, ::2] = 0
    x[2] *= np.float32(1e-35)
    x[3] *= np.float32(1e30)
    x[4] *= np.float32(10.0) ** rng.integers(-38, 30, 512).astype(np.float32)
    x[5, :256] = 0
    x[6] *= np.float32(1e-20)
    out = kernels.matmul(weight, x)
    assert (out[0] == 0).all()
    errors = np.abs(out - exact_product(weight, x))
    # Groups of 32 below 1e-30 count as zero.
    tiny = 1e-30 * np.abs(decoded(weight)).sum(axis=1)
    assert (errors <= largest_errors(implementation, weight, x) + tiny).all()


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_what_is_not_finite_stays_with_its_token(implementation, format_name):
    """One infinity or NaN makes the whole token not finite, and changes no other token's bits."""
    rng = np.random.default_rng(8)
    kernels, weight = implementation.make(), make_weight(rng, format_name, 20, 512)
    x = tokens_of(rng, 12, 512)
    expected = kernels.matmul(weight, x)
    broken = {1: (np.inf, 0), 4: (-np.inf, 300), 5: (np.nan, 255), 11: (np.nan, 511)}
    for token, (value, column) in broken.items():
        x[token, column] = value
    with np.errstate(invalid="ignore"):
        out = kernels.matmul(weight, x)
    others = [token for token in range(12) if token not in broken]
    assert same_bits(out[others], expected[others])
    assert not np.isfinite(out[list(broken)]).any()


@pytest.mark.parametrize("format_name", FORMATS)
def test_instruction_sets_agree(format_name):
    """Integer products are the same in all; those that fuse multiply and add agree to the bit."""
    rng = np.random.default_rng(17)
    weight, x = make_weight(rng, format_name, 50, 1024), tokens_of(rng, 40, 1024)
    outs = {isa: native(isa).matmul(weight, x) for isa in ISAS}
    for isa in ISAS:
        assert_within(outs[isa], outs["portable"], "instruction sets")
        if isa in FUSED:
            assert same_bits(outs[isa], outs["avx2"]), isa


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", ISAS)
def test_callers_do_not_disturb_each_other(isa, threads):
    """Two threads in one NativeKernels at once, with work of different shapes and types."""
    rng = np.random.default_rng(19)
    kernels = native(isa, threads)
    experts = [make_expert(rng, ("Q4_K", "Q4_K", "Q6_K"), 256, 256) for _ in range(3)]
    work = expert_work(rng, experts, [9, 1, 5], tokens=7)
    weight, x = make_weight(rng, "Q5_K", 130, 512), tokens_of(rng, 11, 512)
    jobs = [lambda: kernels.expert_outputs(work), lambda: kernels.matmul(weight, x)]
    expected = [job() for job in jobs]
    right: list[bool] = []
    start = threading.Barrier(2)

    def repeat(index: int) -> None:
        start.wait()
        right.extend(same_bits(jobs[index](), expected[index]) for _ in range(60))

    callers = [threading.Thread(target=repeat, args=(index,)) for index in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(right) == 120
    assert all(right)


_GIVEN_BACK = """
import sys
import numpy as np
from benchmarks.memory import resident
from tests.support.kernel_cases import make_weight, native
import os
kernels = native(sys.argv[1], 1)
weight = make_weight(np.random.default_rng(1), "Q4_K", 32, 2048)
x = np.zeros((16384, 2048), np.float32)
found = []
for prompt in (True, False):
    first = kernels.multiply_all([weight], x, prompt=prompt)[0]
    before = resident(os.getpid()).anonymous
    kernels.give_back_memory()
    found.append(before - resident(os.getpid()).anonymous)
    assert np.array_equal(first, kernels.multiply_all([weight], x, prompt=prompt)[0])
print(*found)
"""


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer keeps what is freed"
)
def test_what_jobs_keep_is_given_back():
    """Rounded activations of 16,384 tokens, at least 32 MB; and the next job computes the same."""
    command = [sys.executable, "-c", _GIVEN_BACK, ISAS[-1]]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert all(int(nbytes) > 30e6 for nbytes in ran.stdout.split()), ran.stdout
