"""A layer of experts as KTransformers computes it: a child that answers requests, in an interpreter with `kt-kernel`.

Runs as a script, and needs NumPy besides. Weights come as `.npy` files of raw GGUF blocks, and go to the backend for
GGUF files ("LLAMAFILE"), with the settings that the package's own wrapper gives it; the wrapper itself asks for memory
that only a GPU's driver has. The package writes to the standard output, which is taken from it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import kt_kernel
import numpy as np
from kt_kernel_ext.kvcache import ggml_type
from kt_kernel_ext.moe import MOE, MOEConfig

_BLOCK_ROWS, _FEWEST_IN_GROUPS = 32, 10
_MATRICES = ("gate", "up", "down")


class KtSide:
    """Some layers of equal shapes."""

    def __init__(self, folder: Path, shape: dict[str, Any], threads: int) -> None:
        pool = kt_kernel.kt_kernel_ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self._pool = kt_kernel.kt_kernel_ext.CPUInfer(pool)
        self._used = shape["used"]
        self._on_device = np.zeros(shape["experts"], np.bool_)
        order = np.arange(shape["experts"], dtype=np.int64)
        self._layers, self._matrices = [], []
        for index in range(shape["layers"]):
            config = MOEConfig(
                shape["experts"],
                shape["used"],
                shape["hidden"],
                shape["intermediate"],
                self._on_device.ctypes.data,
            )
            config.layer_idx, config.pool = index, self._pool.backend_
            config.m_block, config.group_min_len = _BLOCK_ROWS, _FEWEST_IN_GROUPS
            config.max_len = config.group_max_len = shape["most_tokens"]
            matrices = {name: np.load(folder / f"{index}-{name}.npy") for name in _MATRICES}
            for name, blocks in matrices.items():
                setattr(config, f"{name}_proj", blocks.ctypes.data)
                setattr(config, f"{name}_type", shape["types"][name])
            config.hidden_type = int(ggml_type.BF16)
            layer = MOE(config)
            self._matrices.append(matrices)  # it computes from them
            self._pool.submit(layer.load_weights_task(order.ctypes.data))
            self._pool.sync()
            self._layers.append(layer)

    def run(self, request: dict[str, Any]) -> dict[str, list[float]]:
        """Compute the tokens of `request` once for each of its layers, one after the other: milliseconds of each.

        The last one's outputs go to the file `out`.
        """
        x, expert_ids, weights = (np.load(request[name]) for name in ("x", "ids", "weights"))
        count = np.array([len(x)], np.int32)
        halves = _to_bfloat16(x)
        expert_ids = expert_ids.astype(np.int64)
        out = np.zeros_like(halves)
        took_ms = []
        for layer in request["layers"]:
            task = self._layers[layer].forward_task(
                count.ctypes.data,
                self._used,
                expert_ids.ctypes.data,
                weights.ctypes.data,
                halves.ctypes.data,
                out.ctypes.data,
                False,
            )
            start = time.perf_counter()
            self._pool.submit(task)
            self._pool.sync()
            took_ms.append((time.perf_counter() - start) * 1e3)
        np.save(request["out"], (out.astype(np.uint32) << 16).view(np.float32))
        return {"ms": took_ms}


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return float32 `x` as raw bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def main() -> None:
    """Answer JSON lines until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    side = KtSide(
        options.folder, json.loads((options.folder / "shape.json").read_text()), options.threads
    )

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    answer({"version": kt_kernel.__version__, "variant": kt_kernel.kt_kernel_ext.__cpu_variant__})
    for line in sys.stdin:
        answer(side.run(json.loads(line)))


if __name__ == "__main__":
    main()
