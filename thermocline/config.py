"""Every setting of the engine, frozen and checked.

Help texts live in the field metadata, from which the command line makes its flags. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from thermocline.config_checks import (
    require,
    require_at_least,
    require_choice,
    require_within,
    setting,
)
from thermocline.config_remote import ExpertExchange as ExpertExchange
from thermocline.config_remote import ExpertMapKind as ExpertMapKind
from thermocline.config_remote import OnWorkerFailure as OnWorkerFailure
from thermocline.config_remote import ParallelConfig as ParallelConfig
from thermocline.config_remote import RankTransport as RankTransport
from thermocline.config_remote import RemoteConfig as RemoteConfig
from thermocline.config_remote import WorkerMode as WorkerMode
from thermocline.config_remote import WorkerPayload as WorkerPayload
from thermocline.config_remote import WorkerTransport as WorkerTransport
from thermocline.wording import ShowsChanges

HotDevice = Literal["auto", "none", "cpu", "simulated", "cuda", "torch-cpu"]
HotChoice = Literal["use", "even"]
TrunkDevice = Literal["auto", "cpu", "cuda", "torch-cpu"]
CacheChoice = Literal["f16", "bf16", "q8_0", "f32"]
KernelChoice = Literal["native", "reference"]
PrefetchMode = Literal["auto", "on", "off"]
ExpertCacheMode = Literal["auto", "static", "off"]

ALL_LAYERS: Final = 1 << 30
"""More layers than any model has."""
HALF_LIFE_TOKENS: Final = 65536
MAX_SAVE_INTERVAL_S: Final = 86400.0


@dataclass(frozen=True, slots=True, repr=False)
class MemoryConfig(ShowsChanges):
    """How much context there is."""

    max_context_tokens: int | None = setting(
        None,
        "--ctx",
        "Tokens of context per request (default: what the file allows, at most 32768).",
    )
    kv_type: CacheChoice = setting(
        "f16",
        "--kv-type",
        "Numbers of the key-value cache: f16, bf16, q8_0 (half of it, less exact) or f32.",
    )
    max_full_contexts: int | None = None
    """Contexts of full length that the KV cache has room for; memory is used as it fills. None: 4, or as many as
    128 MiB hold, up to one for each request."""
    block_tokens: int = 16
    """Positions per block of the KV cache."""
    max_windows: int = 32
    """Requests whose last tokens layers with a sliding window have room for; memory is used as it fills."""
    max_snapshots: int = 16
    """Copies of recurrent state that are kept for prompts that begin alike; memory is used as they come."""
    snapshot_distance_tokens: int = 1024
    """How far apart copies of the state of a long prompt are, about."""
    spill_bytes: int | None = setting(
        None,
        "--cache-spill",
        "Memory for computed prompts that the cache has no room for any more, such as 8GiB; they come back when a "
        "prompt begins with them, if that is faster than computing (default: none).",
    )
    spill_dir: str | None = setting(
        None,
        "--cache-spill-dir",
        "Folder for a file with those that --cache-spill has no room for; the file ends with the process.",
    )
    spill_disk_bytes: int | None = setting(
        None,
        "--cache-spill-disk",
        "The most that the file in --cache-spill-dir may take (default: 16GiB).",
    )

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError."""
        require_at_least("--ctx", self.max_context_tokens, 1)
        require_choice("--kv-type", self.kv_type, CacheChoice)
        if self.max_full_contexts is not None:
            require_at_least("max_full_contexts", self.max_full_contexts, 1)
        require_within("block_tokens", self.block_tokens, 1, 1024)
        require_at_least("max_windows", self.max_windows, 1)
        require_at_least("max_snapshots", self.max_snapshots, 0)
        require_at_least("snapshot_distance_tokens", self.snapshot_distance_tokens, 1)
        require_at_least("--cache-spill", self.spill_bytes, 0)
        require_at_least("--cache-spill-disk", self.spill_disk_bytes, 1)
        require(self.spill_dir != "", "--cache-spill-dir is empty: name a folder")

    @property
    def spills(self) -> bool:
        """Whether evicted prompts go to a second tier."""
        return bool(self.spill_bytes) or self.spill_dir is not None


@dataclass(frozen=True, slots=True, repr=False)
class PlacementConfig(ShowsChanges):
    """Which experts are hot, and where hot experts compute."""

    hot_device: HotDevice = setting(
        "auto",
        "--hot-device",
        "Where hot experts compute: auto (a GPU, if there is one that computes what the CPU does), none (all experts "
        "are cold), cuda (a GPU), cpu (beside the cold ones), simulated (a device with a thread, a memory and a "
        "copy engine of its own, for studying schedules), or torch-cpu (the GPU's code on the CPU, slow, for "
        "checking).",
    )
    hot_fraction: float = setting(
        0.5,
        "--hot-fraction",
        "Share of the experts that is hot, 0 to 1, with --hot-device cpu or --expert-cache static; as many as "
        "the device has memory for.",
    )
    expert_cache: ExpertCacheMode = setting(
        "auto",
        "--expert-cache",
        "Experts on the hot device: auto (those that are used most, as long as it pays), static (always "
        "the same), or off (none).",
    )
    expert_budget_bytes: int | None = setting(
        None,
        "--expert-budget",
        "Device memory for experts, such as 12GiB (default: what is left of it).",
    )
    device_memory_bytes: int | None = setting(
        None,
        "--device-memory",
        "Memory that may be taken of the device, such as 12GiB, for weights, cache and experts together (default: what "
        "is free there). torch-cpu has so much.",
    )
    hot_choice: HotChoice = setting(
        "use",
        "--hot-choice",
        "Which experts are hot: by their use so far (where it is not known, spread evenly), or even.",
    )
    hot: tuple[str, ...] = setting(
        (),
        "--hot",
        "Experts that are hot in any case: 3:17 is expert 17 of layer 3, 3:16-31 a range, 3 or 3-7 whole "
        "layers; may be given several times.",
    )
    cold: tuple[str, ...] = setting(
        (), "--cold", "Experts that stay on the CPU in any case, written as for --hot."
    )
    n_cpu_moe: int = setting(
        0, "--n-cpu-moe", "Keep the routed experts of the first N layers on the CPU."
    )
    trunk_device: TrunkDevice = setting(
        "auto",
        "--trunk-device",
        "Where all but routed experts and embedding computes: auto (a GPU, if there is one that computes what the CPU "
        "does, as many layers as it has room for; else cpu), cpu (the same kernels as experts), cuda (a GPU, with its cache "
        "there), or torch-cpu (the GPU's code on the CPU, slow, for checking).",
    )
    gpu_layers: int | None = setting(
        None,
        "--gpu-layers",
        "Layers whose non-expert weights and cache are on the GPU: the last N, of which the head counts as the last one; "
        "0 for none, all for the whole trunk, auto (the default) for as many as fit.",
    )
    cpu_moe: bool = setting(
        False,
        "--cpu-moe",
        "Keep every routed expert on the CPU; the trunk goes to the GPU if there is one that has room for it.",
    )
    override_tensor: tuple[str, ...] = setting(
        (),
        "--override-tensor",
        "Put the tensors whose names match a regular expression on the CPU or the GPU, as PATTERN=CPU or PATTERN=CUDA0; "
        "several with commas, or several times. Patterns take a layer's experts, all else of it, or the head whole.",
    )
    simulated_memory_bytes: int = 4 << 30
    """Memory of the simulated device, and what experts have of torch-cpu's without --device-memory."""
    simulated_copy_bytes_per_s: float = 12e9
    """Speed of its copies, in each direction; about that of a GPU behind PCIe 4.0 x8."""
    simulated_slowdown: float = 1.0
    """How many times as long as one thread of the CPU it computes."""

    @property
    def has_hot_tier(self) -> bool:
        """Whether experts may be hot."""
        return self.hot_device != "none" and self.expert_cache != "off"

    @property
    def is_gpu_hot(self) -> bool:
        """Whether hot experts are to compute on a GPU, or on its stand-in."""
        return self.hot_device in ("cuda", "torch-cpu") and self.has_hot_tier

    @property
    def fixed_fraction(self) -> float:
        """The share of each layer's experts that is hot for good; of a cache's none is."""
        is_cache = self.hot_device != "cpu" and self.expert_cache == "auto"
        return self.hot_fraction if self.has_hot_tier and not is_cache else 0.0

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError."""
        require_choice("--hot-device", self.hot_device, HotDevice)
        require_choice("--trunk-device", self.trunk_device, TrunkDevice)
        require_within("--hot-fraction", self.hot_fraction, 0, 1)
        require_choice("--expert-cache", self.expert_cache, ExpertCacheMode)
        require_at_least("--expert-budget", self.expert_budget_bytes, 0)
        require_at_least("--device-memory", self.device_memory_bytes, 1)
        require_choice("--hot-choice", self.hot_choice, HotChoice)
        require(
            self.hot_device != "none" or not self.hot,
            "--hot needs a device for hot experts: give --hot-device",
        )
        require_at_least("--n-cpu-moe", self.n_cpu_moe, 0)
        require_at_least("--gpu-layers", self.gpu_layers, 0)
        require(
            self.simulated_memory_bytes >= 0 and self.simulated_copy_bytes_per_s > 0,
            "simulated_memory_bytes must not be negative, simulated_copy_bytes_per_s must be above 0",
        )
        require_at_least("simulated_slowdown", self.simulated_slowdown, 1)


@dataclass(frozen=True, slots=True, repr=False)
class HeatConfig(ShowsChanges):
    """Whether the use of experts is remembered."""

    enabled: bool = setting(
        True,
        "--heat/--no-heat",
        "Remember how often each expert is used, in the user's cache directory, and place experts by it.",
    )
    file: str | None = setting(
        None, "--heat-file", "Remember it in this file instead; it is made if it is not there."
    )
    save_interval_s: float = setting(
        300.0,
        "--heat-save-interval",
        "Seconds between two saves while the engine runs, so that a crash loses no more; 0 saves at the end alone.",
    )
    saved: bool = True
    """Whether what is seen now is added to what is known."""
    half_life_tokens: int = HALF_LIFE_TOKENS
    """After so many tokens a choice counts half."""

    def __post_init__(self) -> None:
        """Check ranges, and that the flags agree. Raises ConfigError."""
        require(
            self.enabled or self.file is None,
            "--heat-file and --no-heat exclude each other: leave one out",
        )
        require(self.file != "", "--heat-file is empty: name a file")
        require(
            0.0 <= self.save_interval_s <= MAX_SAVE_INTERVAL_S,
            f"--heat-save-interval is {self.save_interval_s}; choose 0 (off) to {MAX_SAVE_INTERVAL_S:.0f} seconds",
        )
        require_at_least("half_life_tokens", self.half_life_tokens, 1)


@dataclass(frozen=True, slots=True, repr=False)
class SchedulerConfig(ShowsChanges):
    """How requests become chunks."""

    prefill_chunk_tokens: int = setting(
        0,
        "--prefill-chunk",
        "Prompt tokens that walk through the layers together, at most; 0 is 1024, or 2048 with a GPU or matrix tiles "
        "and where the model is larger than the memory and every chunk reads it anew.",
    )
    max_prompt_chunks: int = setting(
        0,
        "--prompt-chunks",
        "Prompt chunks in flight at a time; a step of answers has its own place. 0 is 4 where the model is larger than the "
        "memory, 2 with a GPU, workers, ranks or sliding windows there, else 1.",
    )
    decode_slowdown: float = setting(
        1.8,
        "--decode-slowdown",
        "How many times longer an answer's token may take while prompts are computed, at least 1; "
        "prompt chunks shrink to keep it.",
    )
    prefix_cache: bool = setting(
        True,
        "--prefix-cache/--no-prefix-cache",
        "Keep what was computed for a prompt, for requests that begin with the same tokens.",
    )
    overlap: bool = setting(
        True,
        "--overlap/--no-overlap",
        "Let stages work side by side; without it one works at a time, to measure what overlap gives.",
    )
    max_requests: int = setting(
        128, "--max-requests", "Requests accepted at a time, running and waiting; one more is busy."
    )
    max_queue: int = setting(
        64, "--max-queue", "Requests that may wait for room in the cache; one more is busy."
    )
    expected_answer_tokens: int = 512
    """For how long an answer a request gets room before any has ended; 0 starts requests without regard to that."""
    keeps_slots: bool = False
    """Whether the tokens of each slot are remembered, so that its prompt cache can be saved."""

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError."""
        require(
            self.prefill_chunk_tokens >= 0,
            f"--prefill-chunk is {self.prefill_chunk_tokens}; it must be at least 1, or 0 to choose",
        )
        require(
            self.max_prompt_chunks >= 0,
            f"--prompt-chunks is {self.max_prompt_chunks}; it must be at least 1, or 0 to choose",
        )
        require_at_least("--decode-slowdown", self.decode_slowdown, 1)
        require_at_least("--max-requests", self.max_requests, 1)
        require_at_least("--max-queue", self.max_queue, 1)
        require_at_least("expected_answer_tokens", self.expected_answer_tokens, 0)


@dataclass(frozen=True, slots=True, repr=False)
class SpeculationConfig(ShowsChanges):
    """Whether tokens are drafted, so that a step can compute several of one answer."""

    drafters: str = setting(
        "auto",
        "--speculate",
        "Draft tokens where that is faster, for the same answers: auto (all drafters that there are), off, or names: "
        "lookup, mtp, and with --draft-model model, dflash, ddtree, assistant, eagle3.",
    )
    draft_model: str | None = setting(
        None,
        "--draft-model",
        "A file that drafts tokens for the model: a drafter that was trained for it (EAGLE-3, DFlash, or Gemma 4's own "
        "gemma4-assistant), or a small dense model with the same vocabulary.",
    )
    fixed_tokens: int | None = None
    """Verify so many tokens of each draft, for measuring; None: as many as pay."""
    max_draft_states: int = 32
    """Copies of recurrent state that steps with drafts may need; memory is used as they come."""

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError; what drafters there are is seen at open."""
        require_at_least("fixed_tokens", self.fixed_tokens, 1)
        require_at_least("max_draft_states", self.max_draft_states, 0)


@dataclass(frozen=True, slots=True, repr=False)
class PrefetchConfig(ShowsChanges):
    """Reading of experts into memory before they are computed."""

    mode: PrefetchMode = setting(
        "auto",
        "--prefetch",
        "Read experts ahead of their use: auto (while some are not in memory), on, or off (the "
        "operating system's own read-ahead).",
    )

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError."""
        require_choice("--prefetch", self.mode, PrefetchMode)


@dataclass(frozen=True, slots=True, repr=False)
class CpuConfig(ShowsChanges):
    """What the compiled kernels run on."""

    isa: str = setting(
        "auto",
        "--cpu-isa",
        "Instruction set of the CPU kernels: auto (the widest), portable, avx2, avxvnni, avx512, ...",
    )
    threads: int | None = setting(
        None,
        "--threads",
        "Threads that compute (default: one per usable processor; with a GPU, one per physical core but for one).",
    )
    pin: bool = setting(False, "--pin-threads", "Bind each computing thread to a core of its own.")

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError; whether the machine has the set is seen at open."""
        require_within("--threads", self.threads, 1, 1024)


@dataclass(frozen=True, slots=True, repr=False)
class TraceConfig(ShowsChanges):
    """Recording of the timeline."""

    enabled: bool = False
    max_records: int = 1 << 17
    """Records kept, one for each job of a chunk's layer; the oldest are dropped beyond it."""


@dataclass(frozen=True, slots=True, repr=False)
class EngineConfig(ShowsChanges):
    """Everything that `Engine.open` takes besides the file."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    heat: HeatConfig = field(default_factory=HeatConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    kernels: KernelChoice = setting(
        "native", "--kernels", "CPU kernels: native, or reference (slow NumPy twins, for checking)."
    )
    chat_template_file: str | None = setting(
        None,
        "--chat-template-file",
        "A Jinja file in place of the chat template that the model file holds; how the model calls tools and "
        "thinks is read from it.",
    )

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError."""
        require_choice("--kernels", self.kernels, KernelChoice)
        require(
            self.kernels == "native" or not self.remote.workers,
            "--expert-worker goes with --kernels native: workers compute with those",
        )
