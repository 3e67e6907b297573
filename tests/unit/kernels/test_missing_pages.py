"""Experts of a file of which only some pages are in memory: the same bits, and few waits for single pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.kernel_cases import (
    ISAS,
    REFERENCE,
    Implementation,
    make_expert,
    native,
    routed_work,
    same_bits,
    tokens_of,
)
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.kernels.native import load_native
from thermocline.kernels.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.kernels.contract import ExpertWork
    from thermocline.kernels.weight import WeightStack

KERNELS = [REFERENCE, *(Implementation(isa, 2) for isa in (*ISAS, *load_native().emulated_sets()))]
# With tiles and without.
WAYS = [
    [isa for isa in ISAS if isa != "amx"][-1],
    *[isa for isa in (*ISAS, *load_native().emulated_sets()) if isa.startswith("amx")][:1],
]
HIDDEN, INNER = 512, 1024


class StoredExperts:
    """The experts of a work, as they lie in a file of their own."""

    def __init__(self, path: Path, work: ExpertWork) -> None:
        self._path = path
        stacks = [getattr(work.stack, name) for name in ("gate", "up", "down")]
        path.write_bytes(b"".join(stack.raw.tobytes() for stack in stacks))
        self._map = np.memmap(path, np.uint8, "r")
        parts, start = [], 0
        for stack in stacks:
            parts.append(replace(stack, raw=self._view(stack, start)))
            start += stack.raw.nbytes
        self.work = replace(
            work, stack=replace(work.stack, **dict(zip(("gate", "up", "down"), parts, strict=True)))
        )

    def _view(self, stack: WeightStack, start: int) -> np.ndarray:
        return self._map[start : start + stack.raw.nbytes].reshape(stack.raw.shape)

    def drop(self) -> None:
        """Leave every other piece of 64 KiB in memory, and none of the last expert's."""
        kept = self.drop_all()
        last = min(each.raw[-1].nbytes for each in (self.work.stack.up, self.work.stack.down))
        for start in kept[: -(-last >> 16) : 2]:
            load_native().fetch_pages(
                self._map, int(start), min(int(start) + (1 << 16), len(self._map))
            )

    def drop_all(self) -> np.ndarray:
        """Leave nothing in memory; returns where each 64 KiB begin."""
        libc = ctypes.CDLL(None, use_errno=True)
        address, length = ctypes.c_void_p(self._map.ctypes.data), ctypes.c_size_t(len(self._map))
        assert libc.madvise(address, length, mmap.MADV_DONTNEED) == 0
        with self._path.open("rb") as stored:
            os.fsync(stored.fileno())
            os.posix_fadvise(stored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        kept = np.arange(0, len(self._map), 1 << 16)
        if load_native().resident_pages(self._map, kept) > 0:
            pytest.skip("this file system keeps everything in memory")
        # A page that is missing comes alone, as experts are mapped.
        assert libc.madvise(address, length, mmap.MADV_RANDOM) == 0
        return kept


@cache
def experts_of_two_tokens() -> tuple[ExpertWork, np.ndarray, np.ndarray]:
    """Four experts of two tokens with three choices each, the pair of each choice, and a residual."""
    rng = np.random.default_rng(3)
    experts = [make_expert(rng, ("Q4_K", "Q4_K", "Q6_K"), HIDDEN, INNER) for _ in range(4)]
    work, pair_of = routed_work(rng, experts, 2, 3)
    return work, pair_of, tokens_of(rng, 2, HIDDEN)


@pytest.fixture
def stored(tmp_path):
    """The experts, the pairs and the residual; in a file of their own."""
    work, pair_of, residual = experts_of_two_tokens()
    return StoredExperts(tmp_path / "experts", work), pair_of, residual


@pytest.mark.parametrize("implementation", KERNELS, ids=str)
def test_results_do_not_depend_on_what_is_in_memory(implementation, stored) -> None:
    """Outputs and sums of decode steps and of prompts, to the bit."""
    experts, pair_of, residual = stored
    kernels, work = implementation.make(), experts.work
    missing = replace(work, may_be_missing=True)
    for prompt in (False, True):
        outputs = kernels.expert_outputs(work, prompt=prompt)
        total = kernels.expert_sum(work, pair_of, residual, prompt=prompt)
        experts.drop()
        assert same_bits(kernels.expert_outputs(missing, prompt=prompt), outputs)
        experts.drop()
        assert same_bits(kernels.expert_sum(missing, pair_of, residual, prompt=prompt), total)
        assert same_bits(kernels.expert_sum(missing, pair_of, residual, prompt=prompt), total)


@pytest.mark.parametrize("prompt", [False, True], ids=["decode", "prompt"])
@pytest.mark.parametrize("isa", WAYS)
def test_missing_weights_are_asked_for_in_pieces(isa, prompt, stored) -> None:
    """Sums and outputs wait less than a third as often as where each page comes alone."""
    experts, pair_of, residual = stored
    kernels = native(isa, 2)
    sums = partial(kernels.expert_sum, pair_of=pair_of, residual=residual, prompt=prompt)

    def waits(compute: Callable[[ExpertWork], np.ndarray], work: ExpertWork) -> int:
        experts.drop()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        compute(work)
        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before

    for compute in (sums, partial(kernels.expert_outputs, prompt=prompt)):
        alone = waits(compute, experts.work)
        assert alone > 100
        assert waits(compute, replace(experts.work, may_be_missing=True)) < alone / 3


def test_rows_of_a_table_are_asked_for_before_one_is_waited_for(stored) -> None:
    """Of rows that lie apart few are waited for alone, and all come as they are."""
    experts, _, _ = stored
    stack = experts.work.stack.up
    table = Weight("table", stack.format, stack.raw.reshape(-1, stack.raw.shape[-1]), stack.cols)
    kernels, rows = native(ISAS[-1], 1), np.arange(0, table.rows, 24, dtype=np.int32)
    expected = kernels.decode_rows(table, rows)

    def waits(*, may_be_missing: bool) -> int:
        experts.drop_all()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        found = kernels.decode_rows(table, rows, may_be_missing=may_be_missing)
        assert same_bits(found, expected)
        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before

    alone = waits(may_be_missing=False)
    assert alone > 50
    assert waits(may_be_missing=True) < alone / 3


_AS_NOBODY = """
import ctypes, mmap, os, resource, sys
import numpy as np
from thermocline.experts.catalog import ByteSpan, ExpertCatalog
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.cpu import NativeKernels
from thermocline.messages import LayerIndex
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.prefetch.advice import PageAdvisor
kernels = NativeKernels(threads=2)
with open_model_file(sys.argv[2]) as file:  # so that all is imported before
    open_model(file, kernels)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a program that this user started may read its own page map
with open_model_file(sys.argv[1]) as file:
    model = open_model(file, kernels)
    catalog, advisor = ExpertCatalog(model.expert_layers), PageAdvisor(file)
    for layer in catalog.routed_layers:
        advisor.stop_read_ahead(catalog.layer_spans(layer))
    stack, count = catalog.stack(LayerIndex(1)), catalog.num_experts
    every = np.arange(count, dtype=np.int32)
    x = np.ones((1, stack.hidden_size), np.float32)
    for may_be_missing in (False, True):
        work = ExpertWork(stack, every, np.ones(count, np.int32), x, np.zeros(count, np.int32),
                          np.ones(count, np.float32), may_be_missing)
        advisor.release(ByteSpan(0, 0, len(file.mapping(0))))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        kernels.expert_sum(work, every[None], x)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_weights_of_another_users_file_are_asked_for_too(shared_models) -> None:
    """Of its pages mincore says that all are in memory."""
    command = [sys.executable, "-c", _AS_NOBODY, *map(os.fspath, shared_models)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    alone, asked = map(int, ran.stdout.split())
    if alone < 100:
        pytest.skip("this file system keeps everything in memory")
    assert asked < alone / 3


@pytest.fixture
def shared_models():
    """Two copies of a toy file where others may read them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shape = ToyShape(layers=2, hidden=256, intermediate=512)
        paths = [write_toy_model(Path(folder) / name, shape) for name in ("a.gguf", "b.gguf")]
        for path in paths:
            path.chmod(0o644)
            with path.open("rb") as stored:
                os.fsync(stored.fileno())  # what is not on the disk yet stays in memory
        yield paths
