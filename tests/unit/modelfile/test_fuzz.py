"""Thousands of broken files: each opens or is a ModelError, soon, and within a bound of memory.

THERMOCLINE_FUZZ_FILES sets how many (2,000 by default), THERMOCLINE_FUZZ_SEED which; a failure
prints the seed of its batch and keeps the file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import tracemalloc
from random import Random

import numpy as np
import pytest

from tests.support.gguf_mutations import base_files, mutants
from thermocline.errors import ModelError
from thermocline.modelfile.reader import open_model_file

NUM_FILES = int(os.environ.get("THERMOCLINE_FUZZ_FILES", "2000"))
SEED = int(os.environ.get("THERMOCLINE_FUZZ_SEED", "20240607"))
BATCH_FILES = 500  # per test; batch b has the seed SEED + b
MAX_SECONDS_PER_FILE = 2.0
MAX_BYTES_PER_FILE_BYTE = 10
FIXED_BYTES = 128 << 10  # objects that a file of any size costs
ACCESSORS = ("str", "int", "float", "bool", "strings", "ints", "floats", "bools")


def use_everything(path):
    """Open the file and touch all that it offers; return whether it was accepted."""
    try:
        model = open_model_file(path)
    except ModelError:
        return False
    with model:
        for key in model.metadata:
            model.metadata.raw(key)
            for accessor in ACCESSORS:
                try:
                    getattr(model.metadata, f"get_{accessor}")(key)
                except ModelError:
                    continue
        for name, info in model.tensors.items():
            view = model.view(name)
            assert isinstance(view, np.memmap)
            assert view.nbytes == info.nbytes
            int(view.sum(dtype=np.uint64))
        with contextlib.suppress(ModelError):
            model.require_formats({"F32", "Q8_0"})
    return True


def test_the_unbroken_files_are_accepted(tmp_path):
    """The mutants descend from files that open, so that the fuzz gets past the first check."""
    for index, base in enumerate(base_files()):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(base.build())
        assert use_everything(path)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(-(-NUM_FILES // BATCH_FILES)))
def test_mutants_open_or_are_refused(tmp_path, batch):
    """No mutant raises anything but ModelError, hangs, or takes more than ten times its size."""
    path = tmp_path / "mutant.gguf"
    seed = SEED + batch
    num_accepted = 0
    tracemalloc.start()
    try:
        for index, content in enumerate(itertools.islice(mutants(Random(seed)), BATCH_FILES)):
            where = f"seed {seed}, mutant {index}, kept as {path}"
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before_bytes = tracemalloc.get_traced_memory()[0]
            start = time.thread_time()  # a wait would end by the test's own limit
            try:
                num_accepted += use_everything(path)
            except Exception as error:
                raise AssertionError(where) from error
            seconds = time.thread_time() - start
            peak_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
            assert seconds <= MAX_SECONDS_PER_FILE, where
            assert peak_bytes <= MAX_BYTES_PER_FILE_BYTE * len(content) + FIXED_BYTES, where
    finally:
        tracemalloc.stop()
    # Some harm nothing (a hyperparameter's value, a weight): both outcomes must be exercised.
    assert BATCH_FILES // 20 <= num_accepted <= BATCH_FILES * 19 // 20
