"""How fast this machine reads memory with some threads: the limit of decoding one token at a time.

Asks the compiled core, else compiles the small C program beside this file, else takes NumPy's sum, which
is below the limit and is labelled so.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.cpu import load_native

if TYPE_CHECKING:
    from collections.abc import Callable

BUFFER_BYTES: Final = 512 << 20  # far beyond any cache that one guest gets
_PASSES: Final = 5
_SOURCE: Final = Path(__file__).with_name("read_bandwidth.c")


class BandwidthProbe:
    """Measures, and says how: `source` is "native", "compiled" or "numpy (below the limit)"."""

    def __init__(self, threads: int, nbytes: int = BUFFER_BYTES) -> None:
        self.source, self._read = _choose(threads, nbytes)

    def measure(self) -> float:
        """Return GB/s: the best of a few passes within some tenths of a second."""
        return self._read()


def _choose(threads: int, nbytes: int) -> tuple[str, Callable[[], float]]:
    native = getattr(load_native(), "read_bandwidth", None)
    if native is not None:
        return "native", lambda: float(native(threads, nbytes))
    program = _compiled()
    if program is not None:
        return "compiled", functools.partial(_run, program, threads, nbytes)
    return "numpy (below the limit)", functools.partial(_numpy, threads, nbytes)


@functools.cache
def _compiled() -> Path | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    target = Path(tempfile.mkdtemp(prefix="read_bandwidth_")) / "read_bandwidth"
    command = [compiler, "-O3", "-march=native", "-pthread", str(_SOURCE), "-o", str(target)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return target if ran.returncode == 0 else None


def _run(program: Path, threads: int, nbytes: int) -> float:
    command = [str(program), str(threads), str(nbytes), str(_PASSES)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return float(ran.stdout.split()[0])


def _numpy(threads: int, nbytes: int) -> float:
    parts = np.array_split(np.ones(nbytes // 8, np.uint64), threads)
    with ThreadPoolExecutor(threads) as pool:
        best = min(_timed(lambda: list(pool.map(np.sum, parts))) for _ in range(_PASSES))
    return nbytes / best * 1e-9


def _timed(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start
