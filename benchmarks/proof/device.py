"""Stages of `make gpu-proof` about the device itself: what it is, its link, and non-expert weights against the CPU.

`kind` is "cuda", or "torch-cpu" for a rehearsal on torch's CPU. Knows no engine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.synthetic_model import write_model
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kv.cache import KVCacheSpec
from thermocline.messages import Chunk, ChunkId, LayerIndex, RequestId, Segment, SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models.lone_sequence import lone_cache
from thermocline.models.registry import open_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from benchmarks.proof.stage import Sink
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.weight import FloatArray

_TRIES: Final = 9
_SMALL_TRIES: Final = 200
_SMALL_BYTES: Final = 8 << 10
_READ_ONLY: Final = 8  # cudaHostRegisterReadOnly
# NMSE of a layer's outputs: as "non-expert/whole models" in the suite's table of tolerances.
_MAX_ERROR: Final = 1e-3
_BLOCK_TOKENS, _NUM_BLOCKS = 16, 12


def device(sink: Sink, kind: str) -> None:
    """The device, its driver and what computes on it."""
    sink("versions", why=", ".join(f"{name} {version(name)}" for name in ("torch", "triton")))
    if kind != "cuda":
        sink.skip("device", "a rehearsal on torch's CPU")
        return
    import torch

    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    sink("device", why=f"{found.name}, compute {found.major}.{found.minor}")
    sink("memory", total * 2**-30, "GiB")
    sink("free memory", free * 2**-30, "GiB")
    sink("multiprocessors", found.multi_processor_count)
    sink("driver", why=_driver_version())
    sink("runtime", why=f"CUDA {torch.version.cuda}")
    sink("devices", torch.cuda.device_count())


def _driver_version() -> str:
    for place in (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version")):
        try:
            return place.read_text("utf-8").strip().splitlines()[0]
        except (OSError, IndexError):
            continue
    return "unknown"


def copies(sink: Sink, kind: str, nbytes: int) -> None:
    """GB/s of copies from memory of each kind, both ways, and how long a small one takes."""
    import torch

    from thermocline.kernels.gpu.streams import DeviceStreams

    with DeviceStreams.open(kind) as streams, streams.computing():
        there = torch.empty(nbytes, dtype=torch.uint8, device=streams.device)
        pinned = streams.host_empty(nbytes, dtype=torch.uint8).zero_()
        pageable = torch.zeros(nbytes, dtype=torch.uint8)

        def measure(name: str, target: Tensor, source: Tensor, *, times: int = 1) -> None:
            sink.running(name)
            for _ in range(_TRIES + 1):
                took = _seconds(streams, lambda: target.copy_(source, non_blocking=True))
                sink(name, times * nbytes / took * 1e-9, "GB/s")

        measure("pinned to device", there, pinned)
        measure("device to pinned", pinned, there)
        measure("pageable to device", there, pageable)
        measure("device to pageable", pageable, there)
        measure("within the device, read and written", torch.empty_like(there), there, times=2)
        small = there[:_SMALL_BYTES]
        for _ in range(_SMALL_TRIES):
            took = _seconds(streams, lambda: small.copy_(pinned[:_SMALL_BYTES], non_blocking=True))
            sink("8 KiB to the device and a wait", took * 1e6, "us")
        for _ in range(_SMALL_TRIES):
            took = _seconds(streams, lambda: small.add_(1))
            sink("one kernel and a wait", took * 1e6, "us")
        # Last: what the driver refuses here may fail what is launched after it.
        _registered(sink, kind, nbytes, partial(measure, target=there))


def _registered(sink: Sink, kind: str, nbytes: int, measure: Callable[..., None]) -> None:
    """Copies from the mapping of a file that was registered, as experts' pages would be."""
    import torch

    name = "registered mapping to device"
    path = Path(os.environ["THERMOCLINE_CACHE"]).parent / "mapped"
    with path.open("wb") as file:
        file.write(bytes(nbytes))
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    array = np.frombuffer(mapping, np.uint8)
    source = _tensor_of(array)
    measure("mapping to device", source=source)
    if kind != "cuda":
        sink.skip(name, "nothing is registered on torch's CPU")
        return
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's own
    address = array.ctypes.data
    status = int(driver.cudaHostRegister(address, nbytes, _READ_ONLY))
    if status:
        sink.skip(name, f"cudaHostRegister, read only, gave {status}")
        return
    measure(name, source=source)
    driver.cudaHostUnregister(address)


def _tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor on a read-only array, which is only read."""
    import torch

    buffer = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _seconds(streams: DeviceStreams, job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    streams.finish(spin=True)
    return time.perf_counter() - start


def non_expert(sink: Sink, kind: str, shape: str) -> None:
    """Every layer on the device against the CPU: a prompt, a plain step, a captured one, replayed ones, the head."""
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.models.device.non_expert import DeviceNonExpert

    path = write_model(Path(os.environ["THERMOCLINE_CACHE"]).parent / "model.gguf", shape)
    wish = KVCacheSpec(CacheType.F32, _BLOCK_TOKENS, _NUM_BLOCKS, _NUM_BLOCKS, 0, 1)
    with open_model_file(path) as file, DeviceStreams.open(kind) as streams:
        kernels = ReferenceKernels()
        model = open_model(file, kernels)
        there = DeviceNonExpert(model, kernels, streams, wish)
        cache = lone_cache(model.spec, _NUM_BLOCKS, _BLOCK_TOKENS, CacheType.F32)
        rng = np.random.default_rng(5)
        for number, (name, start, tokens) in enumerate(_steps()):
            chunk = _chunk(number, start, tokens)
            x = rng.standard_normal((tokens, model.spec.hidden_size)).astype(np.float32)
            for layer in map(LayerIndex, range(model.spec.num_layers)):
                sink.running(f"{name}, layer {layer}")
                attended = model.attend(layer, chunk, x, cache)
                expected = model.route(layer, chunk, attended)
                begin = time.perf_counter()
                found = there.attend_and_route(layer, chunk, x)
                took = time.perf_counter() - begin
                _compare(sink, f"{name}, residual", found.residual, expected.residual)
                _compare(sink, f"{name}, experts' input", found.x, expected.x)
                sink(f"{name}, a layer", took * 1e6, "us")
            logits, wanted = (each.head(x, prompt=chunk.is_prompt) for each in (there, model))
            _compare(sink, f"{name}, head", logits, wanted)
        has_captured = " 0 layers captured" not in f"{there}"
        sink("steps are captured", ok=has_captured if kind == "cuda" else None, why=f"{there}")


def _steps() -> tuple[tuple[str, int, int], ...]:
    """Names, first positions and tokens of steps, in order. The shape of the last ones is the same."""
    first = 33
    plain = ("plain step", first, 1)
    replayed = [("replayed step", first + 2 + n, 1) for n in range(3)]
    return (("prompt", 0, first), plain, ("captured step", first + 1, 1), *replayed)


def _chunk(number: int, start: int, tokens: int) -> Chunk:
    kind = SegmentKind.PROMPT if tokens > 1 else SegmentKind.DECODE
    blocks = np.arange(_NUM_BLOCKS, dtype=np.int32)[::-1].copy()
    segment = Segment(RequestId(0), 0, tokens, kind, blocks, 1)
    positions = np.arange(start, start + tokens, dtype=np.int32)
    slots = blocks[positions // _BLOCK_TOKENS] * _BLOCK_TOKENS + positions % _BLOCK_TOKENS
    last = np.array([tokens - 1], np.int32)
    return Chunk(ChunkId(number), (segment,), positions, positions, slots.astype(np.int32), last)


def _compare(sink: Sink, name: str, found: FloatArray, expected: FloatArray) -> None:
    wanted = expected.astype(np.float64)
    error = float(np.square(found - wanted).sum() / max(np.square(wanted).sum(), 1e-300))
    is_near = error <= _MAX_ERROR
    why = "" if is_near else f"NMSE {error:.3g}, at most {_MAX_ERROR:g}"
    sink(name, error, "NMSE", ok=is_near, why=why)
