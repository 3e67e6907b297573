"""Opens the remote backend: assigns workers their experts, starts or connects to them, and waits for them.

A worker that is not ready in time is an error; or it is waited for while its experts are computed here, as
configured. Knows no request.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.errors import ConfigError, RemoteError
from thermocline.remote.address import TcpAddress, parse_worker
from thermocline.remote.client import WorkerClient
from thermocline.remote.compute import RemoteExpertBackend, RemoteSettings
from thermocline.remote.connection import WorkerTarget
from thermocline.remote.holdings import held_fingerprint, model_digest
from thermocline.remote.payload import PayloadType
from thermocline.remote.requests import WireShape
from thermocline.remote.worker_process import read_secret

if TYPE_CHECKING:
    from thermocline.config import RemoteConfig
    from thermocline.experts.backends.contract import ExpertBackend
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.contract import Model
    from thermocline.remote.address import WorkerAddress
    from thermocline.remote.assignment import Assignment
    from thermocline.remote.load_balancer import WorkerLoadBalancer
    from thermocline.traces.recorder import Recorder

STREAM_PAIRS: Final = 32
"""Limit of a request's pairs in stream mode: four tokens with eight experts each."""

_READY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """The model that workers must have too. isa: the kernels' instruction set; local: computes what workers do not;
    balancer: see `RemoteSettings`.
    """

    file: ModelFile
    model: Model
    isa: str
    local: ExpertBackend
    balancer: WorkerLoadBalancer | None


def open_remote(
    config: RemoteConfig, opened: OpenedModel, assignment: Assignment, recorder: Recorder
) -> RemoteExpertBackend:
    """Return the backend with its workers; close it. Blocks until they are ready.

    Raises ConfigError, and RemoteError where a worker is not ready and failures are errors.
    """
    max_pairs = config.batch_capacity
    if config.mode == "stream":
        max_pairs = min(max_pairs, STREAM_PAIRS)
    addresses = [parse_worker(text) for text in config.workers]
    secret = None if config.secret_file is None else read_secret(config.secret_file)
    for address in addresses:
        _require_usable(address, config, secret)
    with ExitStack() as started:
        clients = []
        for number, address in enumerate(addresses):
            target = _target(config, opened, assignment, number, address, secret)
            client = WorkerClient(target, config.timeout_s, hedges=config.on_failure == "cpu")
            started.callback(client.close)
            client.start()
            clients.append(client)
        end_s = time.monotonic() + _READY_S
        for client in clients:
            try:
                client.wait_ready(max(end_s - time.monotonic(), 0.0))
            except RemoteError:
                if config.on_failure == "error":
                    raise
        started.pop_all()
        return RemoteExpertBackend(
            assignment,
            clients,
            opened.local,
            RemoteSettings(max_pairs, config.on_failure == "cpu", opened.balancer),
            recorder,
        )


def _target(
    config: RemoteConfig,
    opened: OpenedModel,
    assignment: Assignment,
    number: int,
    address: WorkerAddress,
    secret: bytes | None,
) -> WorkerTarget:
    spec, held = opened.model.spec, assignment.held[number]
    layers = opened.model.expert_layers
    tensors = [info for layer in layers if layer is not None for info in layer.tensors]
    payload = PayloadType[config.payload.upper()]
    return WorkerTarget(
        address=address,
        model_path=opened.file.path,
        isa=opened.isa,
        secret=secret if isinstance(address, TcpAddress) else None,
        transport=config.transport,
        digest=model_digest(opened.file, tensors),
        fingerprint=held_fingerprint(spec, held),
        num_experts=spec.router.num_experts,
        shape=WireShape(spec.expert_hidden_size, config.batch_capacity, payload),
        held=held,
    )


def _require_usable(address: WorkerAddress, config: RemoteConfig, secret: bytes | None) -> None:
    if not isinstance(address, TcpAddress):
        return
    if secret is None:
        raise ConfigError(f"worker {address} needs --worker-secret-file, as the worker does")
    if config.transport == "shared":
        raise ConfigError(f"worker {address} can share no memory: use --worker-transport auto")
