"""Settings of experts that other processes compute: workers, and the ranks of torchrun. A part of `config.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thermocline.config_checks import (
    require,
    require_at_least,
    require_choice,
    require_within,
    setting,
)
from thermocline.wording import ShowsChanges

WorkerPayload = Literal["f32", "f16", "bf16"]
WorkerMode = Literal["auto", "batched", "stream"]
WorkerTransport = Literal["auto", "shared", "stream"]
OnWorkerFailure = Literal["cpu", "error"]
ExpertExchange = Literal["leader", "sequence", "naive"]
ExpertMapKind = Literal["linear", "balanced"]
RankTransport = Literal["auto", "sockets", "torch"]


@dataclass(frozen=True, slots=True, repr=False)
class RemoteConfig(ShowsChanges):
    """Workers that compute some of the experts, in other processes or machines."""

    workers: tuple[str, ...] = setting(
        (),
        "--expert-worker",
        "A worker that computes experts: local (started here; local:N with N threads), unix:PATH or "
        "tcp:HOST:PORT (see thermocline worker). May be given several times.",
    )
    share: float | None = setting(
        None,
        "--worker-share",
        "Share of each layer's experts that workers compute, of those that are not hot, 0 to 1 (default: half; with "
        "--worker-mode auto workers have all, and are given as much as pays).",
    )
    mode: WorkerMode = setting(
        "auto",
        "--worker-mode",
        "How work is given to workers: batched (all of a chunk's layer in one request), stream (small requests), "
        "or auto (batched, and of it so much that worker and this process finish together).",
    )
    payload: WorkerPayload = setting(
        "f32",
        "--worker-payload",
        "Numbers on their way to and from workers: f32, or f16 or bf16 (half the bytes, less exact).",
    )
    transport: WorkerTransport = setting(
        "auto",
        "--worker-transport",
        "How they travel: shared (memory of both), stream (the socket), or auto (shared where it can be).",
    )
    batch_capacity: int = setting(
        4096,
        "--worker-batch-capacity",
        "Most (token, expert) pairs of one request to a worker; a chunk's layer with more takes several.",
    )
    on_failure: OnWorkerFailure = setting(
        "cpu",
        "--on-worker-failure",
        "What a worker does not answer is computed here (cpu), or fails its request (error).",
    )
    timeout_s: float = setting(
        10.0,
        "--worker-timeout",
        "Seconds that a request to a worker may take; one that is later is given up and connected anew.",
    )
    secret_file: str | None = setting(
        None, "--worker-secret-file", "File with the secret that workers on tcp ask for."
    )

    @property
    def held_share(self) -> float:
        """The share that workers hold, where nobody said it."""
        if self.share is not None:
            return self.share
        return 1.0 if self.mode == "auto" else 0.5

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError; whether workers are there is seen at open."""
        require(
            len(self.workers) <= 64,
            f"--expert-worker is given {len(self.workers)} times: at most 64",
        )
        require_within("--worker-share", self.share, 0, 1)
        for value, choices, flag in (
            (self.payload, WorkerPayload, "--worker-payload"),
            (self.mode, WorkerMode, "--worker-mode"),
            (self.transport, WorkerTransport, "--worker-transport"),
            (self.on_failure, OnWorkerFailure, "--on-worker-failure"),
        ):
            require_choice(flag, value, choices)
        require_within("--worker-batch-capacity", self.batch_capacity, 1, 65536)
        require(
            0.0 < self.timeout_s <= 3600.0,
            f"--worker-timeout is {self.timeout_s}; choose above 0, up to 3600 seconds",
        )


@dataclass(frozen=True, slots=True, repr=False)
class ParallelConfig(ShowsChanges):
    """How the ranks that torchrun started share one model. Without torchrun nothing of it is used."""

    dp: int | None = setting(
        None, "--dp", "Replicas under torchrun, each with its own requests (default: ranks / --tp)."
    )
    tp: int | None = setting(
        None, "--tp", "Ranks of a replica under torchrun, which have the same tokens (default: 1)."
    )
    exchange: ExpertExchange = setting(
        "leader",
        "--expert-exchange",
        "Who sends a replica's tokens to the ranks of their experts: leader (its first rank), sequence (each rank some "
        "of the tokens), or naive (every rank all of them, for comparison).",
    )
    payload: WorkerPayload = setting(
        "f32", "--expert-payload", "Numbers on their way between ranks: f32, f16 or bf16."
    )
    expert_map: ExpertMapKind = setting(
        "linear",
        "--expert-map",
        "Which experts each rank owns: linear (neighbours), or balanced (as rank 0 knows their use, with one copy more "
        "on each rank).",
    )
    transport: RankTransport = setting(
        "auto",
        "--rank-transport",
        "How ranks exchange: auto (by memory that they share where all are on one machine, else as sockets), sockets "
        "(few tokens by TCP where that is measured to be faster, else as torch), or torch (its collectives).",
    )
    timeout_s: float = setting(
        10.0,
        "--rank-timeout",
        "Seconds that ranks wait for each other within a layer; the others go on without one that is later.",
    )
    open_timeout_s: float = 600.0
    may_compute_alone: bool = True  # steps without an exchange, where that is faster
    hot_device: str = "none"  # which a rank's experts are on, by --hot-device
    rank: int | None = None  # None where this process is the only one
    num_ranks: int = 1

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError; whether they fit the number of ranks is seen at open."""
        require_at_least("--dp", self.dp, 1)
        require_at_least("--tp", self.tp, 1)
        require_choice("--expert-exchange", self.exchange, ExpertExchange)
        require_choice("--expert-payload", self.payload, WorkerPayload)
        require_choice("--expert-map", self.expert_map, ExpertMapKind)
        require_choice("--rank-transport", self.transport, RankTransport)
        require_within("--rank-timeout", self.timeout_s, 1, 3600)
