"""What `--override-tensor PATTERN=BUFFER` says of the parts that can be placed. Pure.

A part is a layer's routed experts, a layer's other weights with its cache, or the head. A pattern is searched for in
tensor names, and the first one that is found in a name decides, as in llama.cpp. Matrices decide for a part; norms,
biases and scales follow them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from thermocline.modelfile.layout import TensorInfo

_FLAG: Final = "--override-tensor"
_BUFFERS: Final = {"CPU": False, "CUDA0": True, "GPU": True}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERTS: Final = re.compile(r"ffn_(gate_up|gate|up|down)_exps\..+")
_HEAD: Final = ("output.weight", "output.bias", "output_norm.weight", "output_norm.bias")
_EMBEDDING: Final = "token_embd.weight"
_CHOICES: Final = (
    r"what can be placed is a layer's routed experts (blk\.3\.ffn_.*_exps), all else of a layer "
    r"(blk\.3\.(?!ffn_.*_exps)), and the head (^output)"
)


@dataclass(frozen=True, slots=True)
class OverriddenParts:
    """True: on the device; False: on the CPU. A part that is not here is not decided.

    experts, non_expert: by layer.
    """

    experts: Mapping[int, bool] = field(default_factory=dict)
    non_expert: Mapping[int, bool] = field(default_factory=dict)
    head: bool | None = None

    @property
    def wants_non_expert(self) -> bool:
        """Whether some layer's non-expert weights, or the head, are to be on the device."""
        return bool(self.head) or any(self.non_expert.values())


@dataclass(frozen=True, slots=True)
class _Override:
    text: str
    pattern: re.Pattern[str]
    is_device: bool


def overridden_parts(
    texts: Sequence[str], tensors: Iterable[TensorInfo], num_layers: int
) -> OverriddenParts:
    """Return what the values of --override-tensor decide. num_layers: those that are computed.

    Raises ConfigError for what can not be read, matches nothing, or matches a part of what can be placed.
    """
    overrides = [_parse(text) for value in texts for text in value.split(",")]
    if not overrides:
        return OverriddenParts()
    parts: dict[tuple[str, int], list[TensorInfo]] = defaultdict(list)
    for tensor in tensors:
        key = _part_of(tensor.name, num_layers)
        if key is not None:
            parts[key].append(tensor)
    names = [tensor.name for part in parts.values() for tensor in part]
    for override in overrides:
        if not any(map(override.pattern.search, names)):
            raise ConfigError(f"{_FLAG} {override.text} matches no tensor of the model; {_CHOICES}")
    found: dict[tuple[str, int], bool] = {}
    for key, part in parts.items():
        decided = _decide(part, overrides)
        if decided is not None:
            found[key] = decided
    if found.pop(("embedding", 0), False):
        raise ConfigError(
            f"{_FLAG} puts {_EMBEDDING} on the device, and its rows are looked up on the CPU: leave it out"
        )
    return OverriddenParts(
        {layer: there for (kind, layer), there in found.items() if kind == "experts"},
        {layer: there for (kind, layer), there in found.items() if kind == "layer"},
        found.get(("head", 0)),
    )


def _parse(text: str) -> _Override:
    # Buffers have no "=", and patterns may.
    pattern, separator, buffer = text.rpartition("=")
    if not (separator and pattern):
        raise ConfigError(
            f"{_FLAG} {text!r} is not PATTERN=BUFFER: write a regular expression without commas, = and a buffer "
            f"({', '.join(_BUFFERS)})"
        )
    if buffer not in _BUFFERS:
        raise ConfigError(
            f"{_FLAG} {text}: there is no buffer {buffer!r}: choose one of {', '.join(_BUFFERS)}"
        )
    try:
        return _Override(text, re.compile(pattern), _BUFFERS[buffer])
    except re.error as error:
        raise ConfigError(
            f"{_FLAG} {text}: {pattern!r} is not a regular expression ({error}); a dot is written as \\."
        ) from error


def _part_of(name: str, num_layers: int) -> tuple[str, int] | None:
    """Return the kind and layer of the part that a tensor belongs to, None for what is not computed."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return ("head", 0) if name in _HEAD else ("embedding", 0) if name == _EMBEDDING else None
    layer = int(match[1])
    if layer >= num_layers:
        return None
    return ("experts" if _EXPERTS.fullmatch(match[2]) else "layer"), layer


def _decide(part: Sequence[TensorInfo], overrides: Sequence[_Override]) -> bool | None:
    """Return where a part is to be, None where nothing is said of it. Raises ConfigError for half a part."""

    def verdict(tensor: TensorInfo) -> _Override | None:
        return next((each for each in overrides if each.pattern.search(tensor.name)), None)

    matrices = [tensor for tensor in part if len(tensor.shape) > 1] or list(part)
    verdicts = {tensor.name: verdict(tensor) for tensor in matrices}
    where = {None if one is None else one.is_device for one in verdicts.values()}
    if len(where) == 1:
        return where.pop()
    named = next(name for name, one in verdicts.items() if one is not None)
    one = verdicts[named]
    assert one is not None, "it was chosen for having one"
    other = next(
        name for name, each in verdicts.items() if each is None or each.is_device != one.is_device
    )
    raise ConfigError(
        f"{_FLAG} {one.text} moves {named} and not {other}, which go together; {_CHOICES}"
    )
