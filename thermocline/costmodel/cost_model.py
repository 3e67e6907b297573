"""Estimates from measured speeds what an expert, a layer, a prompt and a decoded token cost. Pure.

Adds up what calibration measured part by part; parts that overlap count by their maximum. Knows no clock, file or
device, so hypothetical machines can be estimated too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from thermocline.costmodel.disk_costs import DiskCosts
from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.costmodel.disk_costs import HostMemory
    from thermocline.costmodel.machine_speeds import DeviceSpeeds, MachineSpeeds, RowCosts
    from thermocline.experts.placement.planner import Plan
    from thermocline.models.sizes import LayerSizes, ModelSizes

# A block format of 4.5 bits per weight, as most experts have.
_WEIGHTS_PER_BYTE: Final = 8 / 4.5
# Kernels of a layer on a device: norms, products, rotary embedding, attention; and gate, up, down.
_NON_EXPERT_LAUNCHES: Final = 10
EXPERT_LAUNCHES: Final = 3
ACTIVATION_BYTES: Final = 4
# Memory is the bottleneck from this share of the CPU's time on.
_MEMORY_BOUND: Final = 0.5


class Phase(StrEnum):
    """What is estimated."""

    PREFILL = "prefill"
    DECODE = "decode"


class Resource(StrEnum):
    """What time is spent on; the values are in `plan --json`."""

    NON_EXPERT = "trunk on the CPU"
    EXPERTS = "experts on the CPU"
    ATTENTION = "attention on the CPU"
    HEAD = "head on the CPU"
    OVERHEAD = "bookkeeping"
    DEVICE = "device"
    COPY = "copies"
    DISK = "disk reads"


@dataclass(frozen=True, slots=True)
class Workload:
    """A prompt of `num_tokens` tokens, or a step that decodes one token of so many requests.

    cached_tokens: before a prompt's first token, or before each of a step's. chunk_tokens: of a prompt's chunk.
    steps_since_prompt: steps since a prompt ended; None is long ago.
    """

    phase: Phase
    num_tokens: int
    cached_tokens: int = 0
    chunk_tokens: int = 512
    steps_since_prompt: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """seconds: of the whole phase (of one step, in decode). parts: seconds by resource, which may overlap."""

    phase: Phase
    tokens_per_s: float
    seconds: float
    bound: str
    parts: Mapping[Resource, float]

    def __str__(self) -> str:
        return f"{self.tokens_per_s:.4g} tokens/s, bound by {self.bound}"


def non_expert_kind(layer: LayerSizes) -> str:
    """Return the name by which `MachineSpeeds.trunk` has the costs of this layer's non-expert weights."""
    return ("recurrent" if layer.state else "attention") + ("" if layer.expert else ", dense")


def expert_seconds_cpu(speeds: MachineSpeeds, layout: str, nbytes: float, rows: float) -> float:
    """Return what an expert of `nbytes` bytes costs the CPU's threads with `rows` tokens.

    Raises ConfigError where this layout was not measured.
    """
    return _measured(speeds.experts, layout).seconds(nbytes, rows)


def device_seconds(device: DeviceSpeeds, nbytes: float, rows: float) -> float:
    """Return what `nbytes` bytes in the device's memory cost there: the longer of reading and multiplying.

    Without launches: a layer's experts share theirs.
    """
    arithmetic = nbytes * _WEIGHTS_PER_BYTE * rows / device.multiply_adds_per_s
    return max(nbytes / device.read_bytes_per_s, arithmetic)


def copy_seconds(device: DeviceSpeeds, nbytes: float) -> float:
    """Return the seconds to copy `nbytes` bytes to the device, from pinned memory."""
    return nbytes / device.pinned_to_device_bytes_per_s


def non_expert_seconds_cpu(speeds: MachineSpeeds, layer: LayerSizes, chunk: Workload) -> float:
    """Return what a layer without routed experts costs the CPU, attention included, for one chunk or step.

    Raises ConfigError where no such layer was measured.
    """
    matrices = _measured(speeds.trunk, non_expert_kind(layer)).seconds(
        layer.non_expert, chunk.num_tokens
    )
    return matrices + _attention_seconds(speeds, layer, chunk)


def non_expert_seconds_device(device: DeviceSpeeds, layer: LayerSizes, chunk: Workload) -> float:
    """Return what a layer without routed experts costs the device, attention and launches included."""
    nbytes = layer.non_expert + layer.seen_per_token * layer.seen(chunk.cached_tokens)
    launches_s = _NON_EXPERT_LAUNCHES * device.launch_s
    return device_seconds(device, nbytes, chunk.num_tokens) + launches_s


def head_seconds_cpu(speeds: MachineSpeeds, sizes: ModelSizes, num_rows: int = 1) -> float:
    """Return what the logits of `num_rows` tokens cost the CPU."""
    return speeds.head.seconds(sizes.output, num_rows)


def expected_rows(
    num_experts: int,
    num_used: int,
    num_tokens: int,
    heat: Sequence[float] | None = None,
) -> tuple[tuple[float, float], ...]:
    """Return for each expert the probability that one of `num_tokens` tokens chooses it, and its tokens if so.

    heat: how often each was chosen; None counts all the same. Tokens choose independently.
    """
    total = 0.0 if heat is None else float(sum(heat))
    found = []
    for expert in range(num_experts):
        share = 1 / num_experts if heat is None or not total else heat[expert] / total
        each = min(1.0, num_used * share)
        chosen = 1 - (1 - each) ** num_tokens
        found.append((chosen, num_tokens * each / chosen if chosen else 0.0))
    return tuple(found)


def estimate(
    sizes: ModelSizes,
    speeds: MachineSpeeds,
    plan: Plan | None,
    work: Workload,
    *,
    memory: HostMemory | None = None,
    heat: Sequence[Sequence[float]] | None = None,
    repeats: Sequence[float] | None = None,
) -> Estimate:
    """Return how fast `work` goes.

    plan: what lies on the device, None for nothing. memory: None where the whole file is in memory. heat: as for
    `make_plan`. repeats: by layer, the share of a token's experts that the token before chose too; None takes each to
    choose by itself. Raises ConfigError where the speeds lack the plan's device, a layout or the disk.
    """
    costs = _PhaseCosts(sizes, speeds, plan, heat, repeats)
    disk = DiskCosts(sizes, speeds.disk, plan, memory)
    if work.phase is Phase.DECODE:
        seconds = costs.add_step(work, disk)
    else:
        chunks = _chunks(work)
        seconds = sum(costs.add_chunk(chunk, disk, index) for index, chunk in enumerate(chunks))
        seconds += costs.add_head(1)
    return Estimate(work.phase, work.num_tokens / seconds, seconds, costs.bound(), costs.parts)


def _chunks(work: Workload) -> list[Workload]:
    each = work.chunk_tokens
    return [
        replace(
            work,
            num_tokens=min(each, work.num_tokens - start),
            cached_tokens=work.cached_tokens + start,
        )
        for start in range(0, work.num_tokens, each)
    ]


class _PhaseCosts:
    """Adds up what chunks cost, by resource."""

    def __init__(
        self,
        sizes: ModelSizes,
        speeds: MachineSpeeds,
        plan: Plan | None,
        heat: Sequence[Sequence[float]] | None,
        repeats: Sequence[float] | None,
    ) -> None:
        self._sizes, self._speeds, self._plan, self._heat = sizes, speeds, plan, heat
        self._repeats = repeats
        self.parts = dict.fromkeys(Resource, 0.0)
        self._read_bytes = 0.0  # that the CPU reads from memory
        self._device: DeviceSpeeds | None = None
        self._layers_there: tuple[int, ...] = ()
        self._has_head = False
        if plan is not None and plan.device_bytes > 0:
            if speeds.device is None:
                raise ConfigError("the device's speed is not known: measure it, or describe it")
            self._device = speeds.device
            self._layers_there, self._has_head = plan.device_layers, plan.head_on_device

    def add_step(self, step: Workload, disk: DiskCosts) -> float:
        """Add one step and return its seconds. Layers wait for experts that memory lacks."""
        seconds = self._spend(Resource.OVERHEAD, self._speeds.step_s)
        layers = range(len(self._sizes.layers))
        chosen = [self._read_chances(n, step.num_tokens) for n in layers]
        expert_bytes = [layer.expert for layer in self._sizes.layers]
        again = [self._chosen_again(n) for n in layers]
        absent = disk.absent_shares(chosen, expert_bytes, step.steps_since_prompt, again)
        for index, layer in enumerate(self._sizes.layers):
            seconds += self._non_expert_s(index, step)
            if layer.expert:
                experts_s, selected_bytes = self._experts_s(index, step.num_tokens)
                reads_s, cpu_s = disk.selected_s(selected_bytes * absent[index])
                waits_s = max(reads_s, cpu_s / self._speeds.threads)
                seconds += experts_s + self._spend(Resource.DISK, waits_s)
        return seconds + self.add_head(step.num_tokens)

    def add_chunk(self, chunk: Workload, disk: DiskCosts, index: int) -> float:
        """Add a prompt's chunk and return its seconds: weights are read ahead, in order, while layers compute."""
        seconds = self._spend(Resource.OVERHEAD, self._speeds.step_s)
        read_s = busy_s = 0.0
        for number, layer in enumerate(self._sizes.layers):
            if not index and number not in self._layers_there:
                first_s = self._spend(Resource.DISK, disk.first_use_s(layer.non_expert))
                read_s += first_s
                seconds = max(seconds, read_s) if first_s else seconds
            non_expert_s = self._non_expert_s(number, chunk)
            seconds, busy_s = seconds + non_expert_s, busy_s + non_expert_s
            if layer.expert:
                chances = self._read_chances(number, chunk.num_tokens)
                nbytes = len(chances) * layer.expert
                more_s, cpu_s = disk.stream_s(sum(chances) * layer.expert, nbytes, busy_s, index)
                self._spend(Resource.DISK, more_s)
                ahead_s = more_s * disk.ahead_share(nbytes)
                read_s += ahead_s
                if ahead_s < more_s:
                    read_s = max(read_s, seconds) + more_s - ahead_s
                busy_s = experts_s = self._experts_s(number, chunk.num_tokens)[0]
                # The last of an expert's three products begins when all experts have had the others.
                last_s = read_s + experts_s / 3 if more_s else 0.0
                seconds = max(seconds + experts_s + cpu_s / self._speeds.threads, last_s)
        if not index and not self._has_head and (head_s := disk.first_use_s(self._sizes.output)):
            seconds = max(seconds, read_s + self._spend(Resource.DISK, head_s))
        return seconds

    def add_head(self, num_rows: int) -> float:
        """Add the logits of so many tokens; return the seconds."""
        if self._device is not None and self._has_head:
            seconds = device_seconds(self._device, self._sizes.output, num_rows)
            return self._spend(Resource.DEVICE, seconds)
        self._read_bytes += self._sizes.output
        return self._spend(Resource.HEAD, head_seconds_cpu(self._speeds, self._sizes, num_rows))

    def bound(self) -> str:
        """Return in words what takes the most time."""
        on_cpu = (Resource.NON_EXPERT, Resource.EXPERTS, Resource.ATTENTION, Resource.HEAD)
        cpu_s = sum(self.parts[part] for part in on_cpu)
        others = (Resource.DISK, Resource.DEVICE, Resource.COPY, Resource.OVERHEAD)
        longest = max(others, key=lambda part: self.parts[part])
        if self.parts[longest] > cpu_s:
            return longest.value
        is_memory = self._read_bytes / self._speeds.read_bytes_per_s >= _MEMORY_BOUND * cpu_s
        return "the CPU's memory reads" if is_memory else "the CPU's arithmetic"

    def _rows(self, index: int, num_tokens: int) -> tuple[tuple[float, float], ...]:
        heat = None if self._heat is None else self._heat[index]
        return expected_rows(self._sizes.num_experts, self._sizes.num_used, num_tokens, heat)

    def _read_chances(self, index: int, num_tokens: int) -> list[float]:
        """Return the probability that a step chooses each expert of this layer that is read from the file."""
        if not self._sizes.layers[index].expert:
            return []
        hot = self._hot(index)
        rows = self._rows(index, num_tokens)
        return [chosen for expert, (chosen, _) in enumerate(rows) if expert not in hot]

    def _chosen_again(self, index: int) -> float:
        """Return which part of its choices a token takes from the one before: repeats beyond those of chance."""
        if self._repeats is None or not self._sizes.layers[index].expert:
            return 0.0
        chances = [chosen for chosen, _ in self._rows(index, 1)]
        by_chance = sum(chance * chance for chance in chances) / sum(chances)
        more = self._repeats[index] - by_chance
        return max(0.0, more / (1 - by_chance)) if by_chance < 1 else 0.0

    def _hot(self, index: int) -> frozenset[int]:
        if self._device is None or self._plan is None:
            return frozenset()
        return frozenset(self._plan.placement.hot[index])

    def _non_expert_s(self, index: int, chunk: Workload) -> float:
        layer = self._sizes.layers[index]
        if self._device is not None and index in self._layers_there:
            return self._spend(
                Resource.DEVICE, non_expert_seconds_device(self._device, layer, chunk)
            )
        self._read_bytes += layer.non_expert + layer.seen_per_token * layer.seen(
            chunk.cached_tokens
        )
        attention_s = self._spend(
            Resource.ATTENTION, _attention_seconds(self._speeds, layer, chunk)
        )
        seconds = non_expert_seconds_cpu(self._speeds, layer, chunk)
        self._spend(Resource.NON_EXPERT, seconds - attention_s)
        return seconds

    def _experts_s(self, index: int, num_tokens: int) -> tuple[float, float]:
        """Return the seconds of CPU and device in parallel, and the bytes that the CPU reads."""
        layer, device, hot = self._sizes.layers[index], self._device, self._hot(index)
        rows_of = self._rows(index, num_tokens)
        cpu_s = device_s = cpu_bytes = 0.0
        for expert, (chosen, rows) in enumerate(rows_of):
            if device is not None and expert in hot:
                device_s += chosen * device_seconds(device, layer.expert, rows)
            else:
                costs = expert_seconds_cpu(self._speeds, layer.layout, layer.expert, rows)
                cpu_s, cpu_bytes = cpu_s + chosen * costs, cpu_bytes + chosen * layer.expert
        self._read_bytes += cpu_bytes
        self._spend(Resource.EXPERTS, cpu_s)
        if device is None:
            return cpu_s, cpu_bytes
        if hot:
            device_s += EXPERT_LAUNCHES * device.launch_s
        self._spend(Resource.DEVICE, device_s)
        crosses = cpu_bytes > 0 if index in self._layers_there else bool(hot)
        return max(cpu_s, device_s) + crosses * self._crossing_s(device, num_tokens), cpu_bytes

    def _crossing_s(self, device: DeviceSpeeds, num_tokens: int) -> float:
        """Return the seconds of activations to the other side and back."""
        nbytes = ACTIVATION_BYTES * self._sizes.hidden_size * num_tokens
        back_s = nbytes / device.pinned_to_host_bytes_per_s
        return self._spend(
            Resource.COPY, copy_seconds(device, nbytes) + back_s + 2 * device.launch_s
        )

    def _spend(self, resource: Resource, seconds: float) -> float:
        self.parts[resource] += seconds
        return seconds


def _measured(costs: Mapping[str, RowCosts], name: str) -> RowCosts:
    found = costs.get(name)
    if found is None:
        raise ConfigError(
            f"the speed of {name!r} was not measured: run `thermocline doctor MODEL --again`"
        )
    return found


def _attention_seconds(speeds: MachineSpeeds, layer: LayerSizes, chunk: Workload) -> float:
    """A prompt's token sees those before it and itself, a step's token its own request's, both within the window."""
    if not layer.seen_per_token:
        return 0.0
    cached, count = chunk.cached_tokens, chunk.num_tokens
    if chunk.phase is Phase.DECODE:
        return count * layer.seen(cached + 1) * speeds.attention.decode_pair_s
    window = layer.seen(cached + count)
    # Some tokens see less than the window.
    num_short = min(max(window - cached, 0), count)
    pairs = num_short * cached + num_short * (num_short + 1) / 2 + (count - num_short) * window
    return pairs * speeds.attention.prompt_pair_s
