"""The experts that a worker holds, from its own copy of the model file.

Owns the open file, and the worker's device. Checks the tensors of all experts against the metadata, but maps their bytes, so experts that are
not used are never read. Knows no connection.
"""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import (
    DeviceMemoryError,
    EngineError,
    UnsupportedModelError,
    WorkerFailedError,
    WorkerRefusedError,
)
from thermocline.experts.catalog import ExpertCatalog
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.guarded_model import open_guarded_model
from thermocline.messages import LayerIndex
from thermocline.models.registry import open_model
from thermocline.remote.requests import no_values

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from numpy.typing import NDArray

    from thermocline.kernels.contract import Kernels
    from thermocline.messages import FloatArray, IntArray
    from thermocline.modelfile.layout import TensorInfo
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec
    from thermocline.remote.device_experts import DeviceExperts
    from thermocline.remote.handshake import Hello
    from thermocline.remote.requests import ExpertRequest

_LOG: Final = logging.getLogger("thermocline.remote")
_SAMPLE_BYTES: Final = 512


def model_digest(file: ModelFile, tensors: Sequence[TensorInfo]) -> bytes:
    """Return 16 bytes that tell a model's experts from others': shapes, types, and a sample of each tensor."""
    digest = hashlib.blake2b(file.architecture.encode(), digest_size=16)
    names = [info.name.removesuffix(".weight") + ".scale" for info in tensors]
    scales = [file.tensors[name] for name in names if name in file.tensors]
    for info in (*tensors, *scales):
        digest.update(f"|{info.name}:{info.format.name}:{info.shape}:".encode())
        content = file.mapping(info.shard)[info.offset : info.offset + info.nbytes]
        digest.update(bytes(content[:_SAMPLE_BYTES]))
        digest.update(bytes(content[-_SAMPLE_BYTES:]))
    return digest.digest()


def held_fingerprint(spec: ModelSpec, held: Sequence[Sequence[int] | IntArray]) -> bytes:
    """Return 16 bytes that change with any dimension of the experts, and any held id or its order.

    held: by layer, the model's ids. Two workers with one fingerprint hold the same experts under the same local ids.
    """
    dims = (
        spec.num_layers,
        spec.expert_hidden_size,
        spec.expert_intermediate_size,
        spec.router.num_experts,
        spec.router.num_experts_used,
    )
    digest = hashlib.blake2b(f"{spec.architecture}:{dims}".encode(), digest_size=16)
    for layer, experts in enumerate(held):
        digest.update(f"|{layer}:{','.join(str(int(expert)) for expert in experts)}".encode())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Held:
    """The experts that one parent asked for: by layer int32, the model's id at each place."""

    layers: tuple[IntArray, ...]
    num_experts: int
    nbytes: int
    slots: tuple[IntArray, ...] | None = None
    """On the worker's device, int32 by layer and place, -1 for experts that the CPU computes; None without one."""

    @property
    def num_on_device(self) -> int:
        """Experts that the device computes."""
        return sum(int(np.count_nonzero(slots >= 0)) for slots in self.slots or ())


class HeldModel:
    """A model file of which only experts are used. Close it (or leave its context)."""

    def __init__(self, path: str, kernels: Kernels) -> None:
        """Open and check. Raises ModelError."""
        self._owned = ExitStack()
        self._device: DeviceExperts | None = None
        self._device_thread: ThreadPoolExecutor | None = None
        self._file = open_guarded_model(path)
        # As the model itself reads them: an architecture says which layers have experts, and by which formula.
        model = open_model(self._file, kernels)
        layers = model.expert_layers
        if not model.spec.has_experts:
            raise UnsupportedModelError(
                path,
                "a worker computes routed experts, which this model does not have",
                unsupported=("a model whose layers are all dense",),
                fix="run it without workers",
            )
        self.spec, self.kernels = model.spec, kernels
        self._catalog = ExpertCatalog(layers)
        self.total_bytes = self._catalog.total_bytes
        self.num_experts = sum(layer is not None for layer in layers) * self.spec.router.num_experts
        tensors = [info for layer in layers if layer is not None for info in layer.tensors]
        self.digest = model_digest(self._file, tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def catalog(self) -> ExpertCatalog:
        """Where the experts are in the file."""
        return self._catalog

    @property
    def device(self) -> DeviceExperts | None:
        """What computes experts beside the CPU."""
        return self._device

    def use_device(self, device: DeviceExperts) -> None:
        """Let a device compute what parents hold from now on, as far as it has room; it is closed with this."""
        self._device = self._owned.enter_context(device)
        # Beside the connection's own thread, which computes on the CPU meanwhile.
        self._device_thread = self._owned.enter_context(
            ThreadPoolExecutor(1, "thermocline worker's device")
        )

    def hold(self, hello: Hello) -> Held:
        """Return what the parent asks for, to be given back with `release`.

        Raises WorkerRefusedError when it means another model.
        """
        spec = self.spec
        own = spec.num_layers, spec.router.num_experts, spec.expert_hidden_size
        asked = len(hello.held), hello.num_experts, hello.shape.hidden
        if hello.model != self.digest or own != asked:
            raise WorkerRefusedError(
                f"the worker has another model ({spec.name}: {own[0]} layers, {own[1]} experts of width "
                f"{own[2]}): start it with the file that the parent has"
            )
        if any(len(hello.held[layer]) for layer in spec.dense_layers):
            raise WorkerRefusedError("the placement has experts in a layer without any")
        if hello.fingerprint != held_fingerprint(spec, hello.held):
            raise WorkerRefusedError(
                "the placement's fingerprint is another: run the same thermocline on both sides"
            )
        nbytes = sum(
            len(experts) * self._catalog.expert_bytes(LayerIndex(layer))
            for layer, experts in enumerate(hello.held)
        )
        slots = None if self._device is None else self._device.hold(hello.held)
        return Held(hello.held, sum(map(len, hello.held)), nbytes, slots)

    def release(self, held: Held) -> None:
        """Take back what `hold` returned."""
        if self._device is not None and held.slots is not None:
            self._device.release(held.layers, held.slots)

    def describe_kernels(self, held: Held) -> str:
        """Return what computes a parent's experts, for people."""
        if self._device is None or not held.num_on_device:
            return self.kernels.name
        return f"{self.kernels.name}, {held.num_on_device} of {held.num_experts} experts on {self._device.name}"

    def compute(self, held: Held, request: ExpertRequest) -> FloatArray:
        """Return float32 [pairs, hidden], the weighted output of each pair. Raises WorkerFailedError."""
        if not len(request.rows):
            return no_values(self.spec.expert_hidden_size)
        work = ExpertWork(
            self._catalog.stack(LayerIndex(request.layer)),
            held.layers[request.layer][request.experts],
            request.counts,
            request.x,
            request.rows,
            request.weights,
        )
        if held.slots is None:
            outputs = self.kernels.expert_outputs(work, prompt=request.is_prompt)
        else:
            slots = held.slots[request.layer][request.experts]
            outputs = self._compute_split(request, work, slots)
        self._require_file()
        return outputs

    def close(self) -> None:
        """Let the device and the file go."""
        self._owned.close()
        self._file.close()

    def _compute_split(
        self, request: ExpertRequest, work: ExpertWork, slots: IntArray
    ) -> FloatArray:
        """Compute on the device what it has, and the rest on the CPU at the same time."""
        device, thread, prompt = self._device, self._device_thread, request.is_prompt
        is_there = slots >= 0
        if device is None or thread is None or not is_there.any():
            return self.kernels.expert_outputs(work, prompt=prompt)
        if is_there.all():
            try:
                return device.outputs(request.layer, work, slots, prompt=prompt)
            except EngineError as error:
                self._give_up_device(error)
                return self.kernels.expert_outputs(work, prompt=prompt)
        there, here = _part(work, is_there), _part(work, ~is_there)
        begun = thread.submit(device.outputs, request.layer, there, slots[is_there], prompt=prompt)
        pairs = np.repeat(is_there, work.counts)
        outputs = np.empty((len(work.rows), self.spec.expert_hidden_size), np.float32)
        outputs[~pairs] = self.kernels.expert_outputs(here, prompt=prompt)
        try:
            outputs[pairs] = begun.result()
        except EngineError as error:
            self._give_up_device(error)
            outputs[pairs] = self.kernels.expert_outputs(there, prompt=prompt)
        return outputs

    def _give_up_device(self, error: EngineError) -> None:
        """Compute everything on the CPU from now on, unless activations found no room just once."""
        if isinstance(error, DeviceMemoryError):
            _LOG.warning("%s; computed on the CPU", error)
            return
        _LOG.warning("%s; this worker computes on the CPU from now on", error)
        self._device = None

    def _require_file(self) -> None:
        change = self._file.find_change()
        if change is not None:
            raise WorkerFailedError(
                f"{change.path} was changed: {change.what}; restore it, and start the worker again"
            )


def _part(work: ExpertWork, wanted: NDArray[np.bool_]) -> ExpertWork:
    """Return the work of some of the experts, bool [experts], with only the tokens that they have."""
    pairs = np.repeat(wanted, work.counts)
    tokens, rows = np.unique(work.rows[pairs], return_inverse=True)
    return ExpertWork(
        work.stack,
        work.experts[wanted],
        work.counts[wanted],
        work.x[tokens],
        rows.astype(np.int32),
        work.scale[pairs],
    )
