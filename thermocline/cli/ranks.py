"""Commands under torchrun: rank 0 is the command, the other ranks follow it and print nothing but errors."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.environment import local_rank, torchrun_ranks
from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from thermocline.config import CpuConfig, EngineConfig


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
    num_processors = default_threads(beside_gpu=False)
    if num_local > 1:
        _keep_to_own_processors(config.cpu, num_local)
    if config.cpu.threads is None and num_local > 1:
        # Ranks of one machine share its processors.
        threads = max(num_processors // num_local, 1)
        config = replace(config, cpu=replace(config.cpu, threads=threads))
    return config


def _keep_to_own_processors(cpu: CpuConfig, num_local: int) -> None:
    """Have this process's threads run on its share of the machine: where there are NUMA nodes, or threads are pinned.

    Memory is given by the node that first uses it: a rank reads its own experts, which so lie beside the threads
    that compute them. With more threads asked for than a share has, all may run anywhere.
    """
    from thermocline.kernels.cpu_topology import core_of_each, processors_by_node, share_of

    allowed = os.sched_getaffinity(0)
    nodes = processors_by_node(allowed)
    if len(nodes) == 1 and not cpu.pin:
        return
    share = share_of(local_rank(), num_local, nodes, core_of_each(allowed))
    if (cpu.threads or 1) <= len(share):
        os.sched_setaffinity(0, share)


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
