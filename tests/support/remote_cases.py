"""Workers, targets and requests for tests of remote experts: small, made in milliseconds, and told apart."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from thermocline.kernels.cpu import NativeKernels
from thermocline.remote.address import TcpAddress, UnixAddress
from thermocline.remote.connection import WorkerTarget
from thermocline.remote.holdings import HeldModel, held_fingerprint
from thermocline.remote.payload import PayloadType
from thermocline.remote.requests import ExpertRequest, WireShape
from thermocline.remote.worker import open_listener, serve_listener

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from thermocline.remote.address import WorkerAddress


class ServedModel(HeldModel):
    """A model that a worker serves, and where."""

    address: WorkerAddress


@contextmanager
def running_worker(
    model_path: Path, where: Path | TcpAddress, secret: bytes | None = None
) -> Iterator[ServedModel]:
    """Serve the model on a Unix socket or a free port, from threads of this process."""
    listens = where if isinstance(where, TcpAddress) else UnixAddress(str(where))
    with (
        ServedModel(str(model_path), NativeKernels(threads=1)) as model,
        open_listener(listens) as listener,
    ):
        model.address = listens
        if isinstance(where, TcpAddress):
            model.address = TcpAddress(where.host, listener.getsockname()[1])
        serving = threading.Thread(target=serve_listener, args=(listener, model, secret))
        serving.start()
        try:
            yield model
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()


def target_of(model: HeldModel, where: Path | WorkerAddress, **changes: Any) -> WorkerTarget:
    """Return a target that holds every second expert of each layer of the model."""
    held = tuple(
        np.arange(1, model.spec.router.num_experts, 2, dtype=np.int32)
        for _ in range(model.spec.num_layers)
    )
    target = WorkerTarget(
        address=UnixAddress(str(where)) if isinstance(where, PurePath) else where,
        model_path="",
        isa="auto",
        secret=None,
        transport="auto",
        digest=model.digest,
        fingerprint=held_fingerprint(model.spec, held),
        num_experts=model.spec.router.num_experts,
        shape=WireShape(model.spec.expert_hidden_size, 256, PayloadType.F32),
        held=held,
    )
    return replace(target, **changes)


def some_request(
    target: WorkerTarget, num_tokens: int, seed: int = 0, layer: int = 0
) -> ExpertRequest:
    """Return a request of `num_tokens` tokens, each of which chose two of the held experts."""
    rng = np.random.default_rng(seed)
    num_held = len(target.held[layer])
    chosen = np.array([rng.permutation(num_held)[:2] for _ in range(num_tokens)]).reshape(-1)
    order = np.argsort(chosen, kind="stable")
    experts, counts = np.unique(chosen, return_counts=True)
    return ExpertRequest(
        layer,
        True,
        rng.standard_normal((num_tokens, target.shape.hidden)).astype(np.float32),
        np.arange(num_tokens),
        experts.astype(np.int32),
        counts.astype(np.int32),
        (order // 2).astype(np.int32),
        rng.random(2 * num_tokens).astype(np.float32),
    )
