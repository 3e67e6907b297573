"""Opens one rank of a model on several: its member of the group, its part of steps, and on rank 0 the step loops.

A part of the assembly; loads torch only where there are several ranks.
"""

from __future__ import annotations

import logging
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final
from zlib import crc32

from thermocline.engine.scheduler_builder import build_step_loop
from thermocline.engine.spill_builder import open_spill
from thermocline.environment import local_rank, rank_network, set_gloo_interface
from thermocline.errors import ConfigError, MeshError
from thermocline.experts.dispatch.offload_selector import OffloadSelector
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu_topology import checked_threads
from thermocline.machine import machine_facts
from thermocline.models.sizes import lasting_bytes
from thermocline.parallel.exchange import RankParts
from thermocline.parallel.group import connector
from thermocline.parallel.links import interface_of, own_address
from thermocline.parallel.map_choice import ChosenMap, choose_map, map_text, read_map
from thermocline.parallel.mesh import make_mesh
from thermocline.parallel.parts import mixed_row_bytes, mixing_of
from thermocline.parallel.rank import MAX_ROUNDS, MeshPlan, RankMember
from thermocline.parallel.rank_experts import RankExperts
from thermocline.parallel.rendezvous import Rendezvous, open_store
from thermocline.parallel.turns import TurnThread
from thermocline.pipeline.execution.rank_steps import RankSteps
from thermocline.pipeline.execution.replicas import Conductor, ConductorRules
from thermocline.pipeline.replica_loops import ReplicaLoops
from thermocline.prefetch.memory import page_cache_room_bytes
from thermocline.remote.holdings import model_digest
from thermocline.remote.payload import PayloadType

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.config import EngineConfig
    from thermocline.engine.build_context import BuildContext
    from thermocline.engine.expert_stages import ExpertBackends
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.experts.heat import HeatRecord
    from thermocline.experts.routing_log import RoutingLog
    from thermocline.kv.cache import SequenceCache
    from thermocline.models.prompt_limits import PromptLimits
    from thermocline.models.spec import ModelSpec
    from thermocline.pipeline.execution.runner import Runner
    from thermocline.pipeline.replica_loops import AnyStepLoop
    from thermocline.speculation.speculator import Speculator
    from thermocline.workers.lane import LaneThread


_LOG: Final = logging.getLogger("thermocline.parallel")
_BACKEND: Final = "cpu:gloo"
_FIRST_RETRY: Final = 16
"""Steps until the slower way is tried again. When a rank first computes alone it touches pages of experts that it does not
own, so that way's first trial is slower than it will be: two ranks had half the speed for 256 steps."""
_MAP: Final = "experts"
"""Under which rank 0 tells its map."""


def for_ranks(config: EngineConfig) -> EngineConfig:
    """Return the config as ranks use it; the config itself for one process. Raises ConfigError."""
    if config.parallel.rank is None:
        return config
    placement = config.placement
    if placement.trunk_device not in ("auto", "cpu") or placement.gpu_layers:
        raise ConfigError(
            "ranks compute all but experts on their CPUs: leave out --trunk-device and --gpu-layers"
        )
    if placement.hot or placement.cold or placement.override_tensor:
        raise ConfigError(
            "a rank's device gets the experts that it owns, the most used first: leave out --hot, --cold and --override-tensor"
        )
    hot_device = placement.hot_device
    if placement.cpu_moe or not placement.has_hot_tier:
        hot_device = "none"
    if config.remote.workers:
        raise ConfigError("--expert-worker does not go with torchrun: ranks compute the experts")
    placement = replace(placement, hot_device="none", trunk_device="cpu")
    speculation = replace(config.speculation, drafters="off")
    # Each rank counts the choices of the tokens that it routes. Those of a replica route the same ones, and of a prompt
    # each a part: the first one's is a sample of it.
    mesh = make_mesh(config.parallel.num_ranks, config.parallel.dp, config.parallel.tp)
    is_leader = mesh.replicas[mesh.replica_of(config.parallel.rank)][0] == config.parallel.rank
    heat = config.heat if is_leader else replace(config.heat, saved=False)
    parallel = replace(config.parallel, hot_device=hot_device)
    return replace(
        config, placement=placement, speculation=speculation, heat=heat, parallel=parallel
    )


def largest_chunk(config: EngineConfig, spec: ModelSpec, limits: PromptLimits) -> int:
    """Return the most tokens that a chunk can have: a prompt's, or a step of all answers and what they compute again."""
    expanded = 0 if spec.latent is None else spec.latent.expanded_tokens
    return limits.chunk_tokens + max(config.scheduler.max_requests, expanded)


def open_member(
    context: BuildContext, catalog: ExpertCatalog, cpu: LaneThread, known: HeatRecord | None
) -> RankMember | None:
    """Return this process as a rank, None where it is the only one. Raises ConfigError and MeshError.

    known: the use of experts so far, which rank 0 balances them by.
    """
    parallel, spec = context.config.parallel, context.model.spec
    if parallel.rank is None:
        return None
    if not spec.has_experts:
        raise ConfigError(
            "the model has no routed experts, which are what ranks share: start it without torchrun"
        )
    mesh = make_mesh(parallel.num_ranks, parallel.dp, parallel.tp)
    store = open_store(parallel.open_timeout_s)
    rendezvous = Rendezvous(store, parallel.rank, parallel.timeout_s)
    context.owned.callback(rendezvous.close)
    experts, reason = _agreed_map(context, mesh.size, rendezvous, known)
    plan = MeshPlan(
        mesh,
        experts,
        parallel.exchange,
        largest_chunk(context.config, spec, context.limits),
        spec.router.num_experts_used,
        reason,
        mixed_row_bytes(spec, CacheType[context.config.memory.kv_type.upper()]),
    )
    held = RankExperts(context.kernels, None if known is None else known.warmth)
    context.owned.callback(held.close)
    _use_device(context, catalog, held)
    parts = RankParts(
        catalog,
        context.kernels,
        held,
        cpu,
        context.recorder,
        TurnThread(),
        PayloadType[parallel.payload.upper()],
        spec.expert_hidden_size,
        spec.router.num_experts_used,
        mixing_of(spec),
    )
    connect = connector(store, parallel.timeout_s, _BACKEND, parallel.transport, _network())
    member = RankMember(parallel.rank, plan, parts, connect, rendezvous)
    return context.owned.enter_context(closing(member))


def _use_device(context: BuildContext, catalog: ExpertCatalog, held: RankExperts) -> None:
    """Open the device that --hot-device names, for as many of the rank's experts as it has room for. Raises what opening raises."""
    kind, placement = context.config.parallel.hot_device, context.config.placement
    if kind in ("none", "cpu"):
        return
    from thermocline.remote.device_experts import WorkerDeviceWish, open_wished_device

    limits = [placement.device_memory_bytes, placement.expert_budget_bytes]
    if kind == "simulated":
        limits.append(placement.simulated_memory_bytes)
    memory_bytes = min((limit for limit in limits if limit is not None), default=None)
    threads = checked_threads(context.config.cpu.threads)
    wish = WorkerDeviceWish(
        kind, memory_bytes, catalog, context.kernels, threads, number=local_rank()
    )
    device = open_wished_device(wish, _LOG.warning)
    if device is not None:
        held.use_device(device, placement.n_cpu_moe)


def _network() -> Callable[[], str]:
    """Return what returns this machine's address among the ranks', or raises OSError.

    gloo takes the interface of the machine's name, which is often the loopback device. Unless it was told one, it gets the one
    by which the first rank is reached.
    """
    master, interface = rank_network()
    address = partial(own_address, master, interface)
    if interface is None:
        with suppress(OSError):
            found = interface_of(address())
            if found is not None:
                set_gloo_interface(found)
    return address


def _agreed_map(
    context: BuildContext, num_ranks: int, rendezvous: Rendezvous, known: HeatRecord | None
) -> ChosenMap:
    """Return rank 0's map, which it alone decides: what others know of the use may differ. Raises MeshEndedError.

    One that does not fit this rank's model is not an error yet: when the ranks meet, all are told what differs.
    """
    parallel, spec = context.config.parallel, context.model.spec
    shape = spec.num_layers, spec.router.num_experts
    if parallel.rank == 0:
        warmth = None if known is None else known.warmth
        chosen = choose_map(parallel.expert_map, shape, num_ranks, warmth)
        rendezvous.tell(_MAP, map_text(chosen.experts))
        return chosen
    text = rendezvous.hear(_MAP, parallel.open_timeout_s)
    try:
        return ChosenMap(read_map(text, shape, num_ranks), "as rank 0 decided")
    except MeshError:
        return choose_map("linear", shape, num_ranks, None)


def _join_ranks(context: BuildContext, member: RankMember) -> None:
    """Wait for the other ranks, which have opened the same model in the same way. Raises MeshError."""
    config, file, model, cache = context.config, context.file, context.model, context.devices.cache
    tensors = [info for layer in model.expert_layers if layer is not None for info in layer.tensors]
    same = replace(config.parallel, rank=None)
    facts = {
        "version": machine_facts().versions["thermocline"],
        "model file": f"{file.total_tensor_bytes} bytes, {model_digest(file, tensors).hex()}",
        "kernels (--cpu-isa, --kernels)": context.kernels.name.split(" x ")[0],
        "flag": f"{same!r} {config.memory!r} {config.scheduler!r}",
        "map of experts": f"{crc32(map_text(member.experts).encode()):x}",
        "size of the cache": f"{cache.num_blocks} blocks, {cache.num_states} states",
    }
    needed = lasting_bytes(file.tensors.values(), model.spec)
    holds_file = needed <= page_cache_room_bytes()
    member.join(facts, config.parallel.open_timeout_s, holds_file=holds_file)


def build_loops(
    context: BuildContext,
    experts: ExpertBackends,
    runner: Runner,
    cpu: LaneThread,
    routing_log: RoutingLog,
    speculator: Speculator,
    cache: SequenceCache,
) -> AnyStepLoop:
    """Return what drives the runner: one step loop, or of several ranks those of all replicas, once all have joined.

    cache: the CPU's. Raises ConfigError and MeshError.
    """
    member, tier = experts.member, open_spill(context, cache)
    if member is None:
        room = None if experts.hot_device is None else experts.hot_device.room
        return build_step_loop(context, runner, cpu, routing_log, speculator, room, tier)
    return _replica_loops(context, member, runner, cpu, routing_log)


def _replica_loops(
    context: BuildContext,
    member: RankMember,
    runner: Runner,
    cpu: LaneThread,
    routing_log: RoutingLog,
) -> ReplicaLoops:
    """Return rank 0's step loops, one for each replica."""
    config, spec = context.config, context.model.spec
    _join_ranks(context, member)
    may_compute_alone = config.parallel.may_compute_alone and member.all_hold_the_file
    rules = ConductorRules(
        context.limits.max_prompt_chunks + 1,
        keeps_results=not spec.has_states,
        quiet_s=config.parallel.timeout_s / 4,
        # A chunk that computes one stage at a time keeps the lane, which another round's would need.
        max_rounds=MAX_ROUNDS if config.scheduler.overlap else 1,
    )
    conductor = Conductor(
        member,
        RankSteps(member, runner, cpu),
        (spec.vocab_size, spec.hidden_size),
        rules,
        OffloadSelector(first_retry=_FIRST_RETRY) if may_compute_alone else None,
    )
    loops = [build_step_loop(context, each, None, routing_log, None) for each in conductor.runners]
    return ReplicaLoops(loops, conductor)
