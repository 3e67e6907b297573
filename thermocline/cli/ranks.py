"""Commands under torchrun: rank 0 is the command, the other ranks follow it and print nothing but errors."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.environment import torchrun_ranks
from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from thermocline.config import EngineConfig


def as_rank(config: EngineConfig) -> EngineConfig:
    """Return the config of this rank; the config itself without torchrun. Raises ConfigError."""
    from thermocline.kernels.cpu_topology import default_threads

    found, parallel = torchrun_ranks(), config.parallel
    if found is None or found[1] == 1:
        if (parallel.dp or 1) * (parallel.tp or 1) > 1:
            raise ConfigError(
                "--dp and --tp are for several ranks: start them with torchrun (docs/distributed.md)"
            )
        return config
    rank, num_ranks, num_local = found
    config = replace(config, parallel=replace(parallel, rank=rank, num_ranks=num_ranks))
    if config.cpu.threads is None and num_local > 1:
        # Ranks of one machine share its processors.
        threads = max(default_threads(beside_gpu=False) // num_local, 1)
        config = replace(config, cpu=replace(config.cpu, threads=threads))
    return config


def has_followed(path: str, config: EngineConfig, trace: Path | None = None) -> bool:
    """Follow rank 0 to its end and return True; False at once on rank 0, or for the only process.

    trace: rank 0's file for its timeline; this rank's lies beside it (`rank_file`). Raises what opening raises, and MeshEndedError.
    """
    rank = config.parallel.rank
    if not rank:
        return False
    from thermocline.config import TraceConfig
    from thermocline.engine.follower import follow

    # Ctrl-C reaches every rank of a terminal. Rank 0 ends the service, and with it the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if trace is None:
        follow(path, config)
    else:
        config = replace(config, trace=TraceConfig(enabled=True))
        follow(path, config, rank_file(trace, rank))
    return True


def rank_file(trace: Path, rank: int) -> Path:
    """Return where a rank writes its timeline: run.json.gz becomes run.rank1.json.gz."""
    stem, dot, suffixes = trace.name.partition(".")
    return trace.with_name(f"{stem}.rank{rank}{dot}{suffixes}")
