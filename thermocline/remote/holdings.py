"""The experts that a worker holds, from its own copy of the model file.

Owns the open file. Checks the tensors of all experts against the metadata, but maps their bytes, so experts that are
not used are never read. Knows no connection.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.errors import UnsupportedModelError, WorkerFailedError, WorkerRefusedError
from thermocline.experts.catalog import ExpertCatalog
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.guarded_model import open_guarded_model
from thermocline.messages import LayerIndex
from thermocline.models.registry import open_model
from thermocline.remote.requests import no_values

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from thermocline.kernels.contract import Kernels
    from thermocline.messages import FloatArray, IntArray
    from thermocline.modelfile.layout import TensorInfo
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec
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


class HeldModel:
    """A model file of which only experts are used. Close it (or leave its context)."""

    def __init__(self, path: str, kernels: Kernels) -> None:
        """Open and check. Raises ModelError."""
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

    def hold(self, hello: Hello) -> Held:
        """Return what the parent asks for. Raises WorkerRefusedError when it means another model."""
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
        return Held(hello.held, sum(map(len, hello.held)), nbytes)

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
        outputs = self.kernels.expert_outputs(work, prompt=request.is_prompt)
        self._require_file()
        return outputs

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

    def _require_file(self) -> None:
        change = self._file.find_change()
        if change is not None:
            raise WorkerFailedError(
                f"{change.path} was changed: {change.what}; restore it, and start the worker again"
            )
