"""The experts that a worker holds, from its own copy of the model file.

Owns the open file, and the worker's device. Checks the tensors of all experts against the metadata, but maps their bytes, so experts that are
not used are never read. Knows no connection.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import UnsupportedModelError, WorkerFailedError, WorkerRefusedError
from thermocline.experts.catalog import ExpertCatalog
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.guarded_model import open_guarded_model
from thermocline.messages import LayerIndex
from thermocline.models.registry import open_model
from thermocline.remote.requests import no_values
from thermocline.remote.split_experts import SplitExperts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from thermocline.kernels.contract import Kernels
    from thermocline.messages import FloatArray, IntArray
    from thermocline.modelfile.layout import TensorInfo
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec
    from thermocline.remote.device_experts import DeviceExperts
    from thermocline.remote.handshake import Hello
    from thermocline.remote.requests import ExpertRequest

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
    """Return 16 bytes that change with any dimension and limit of the experts, and any held id or its order.

    held: by layer, the model's ids. Two workers with one fingerprint hold the same experts under the same local ids.
    """
    dims = (
        spec.num_layers,
        spec.expert_hidden_size,
        spec.expert_intermediate_size,
        spec.router.num_experts,
        spec.router.num_experts_used,
        spec.expert_limits,
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
        self._experts = SplitExperts(kernels)
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
        return self._experts.device

    def use_device(self, device: DeviceExperts) -> None:
        """Let a device compute what parents hold from now on, as far as it has room; it is closed with this."""
        self._experts.use_device(device)

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
        slots = None if self.device is None else self.device.hold(hello.held)
        return Held(hello.held, sum(map(len, hello.held)), nbytes, slots)

    def release(self, held: Held) -> None:
        """Take back what `hold` returned."""
        if self.device is not None and held.slots is not None:
            self.device.release(held.layers, held.slots)

    def describe_kernels(self, held: Held) -> str:
        """Return what computes a parent's experts, for people."""
        if self.device is None or not held.num_on_device:
            return self.kernels.name
        return f"{self.kernels.name}, {held.num_on_device} of {held.num_experts} experts on {self.device.name}"

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
        slots = None if held.slots is None else held.slots[request.layer][request.experts]
        outputs = self._experts.outputs(request.layer, work, slots, prompt=request.is_prompt)
        self._require_file()
        return outputs

    def close(self) -> None:
        """Let the device and the file go."""
        self._experts.close()
        self._file.close()

    def _require_file(self) -> None:
        change = self._file.find_change()
        if change is not None:
            raise WorkerFailedError(
                f"{change.path} was changed: {change.what}; restore it, and start the worker again"
            )
