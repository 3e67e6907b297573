"""Which of a model's non-expert weights are on a device: some layers, and the head. Pure.

Knows no sizes and no flags.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DevicePart:
    """layers: in ascending order; each with its keys and values, or its recurrent states. has_head: norm and matrix."""

    num_layers: int
    layers: tuple[int, ...] = ()
    has_head: bool = False

    @classmethod
    def last(cls, num_layers: int, count: int) -> DevicePart:
        """Return the last `count` of all layers, among which the head counts as the last one."""
        first = max(num_layers + 1 - count, 0)
        return cls(num_layers, tuple(range(first, num_layers)), count > 0)

    @classmethod
    def whole(cls, num_layers: int) -> DevicePart:
        """Return all layers and the head."""
        return cls.last(num_layers, num_layers + 1)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on the device."""
        return not (self.layers or self.has_head)

    @property
    def is_whole(self) -> bool:
        """Whether everything is."""
        return self.has_head and len(self.layers) == self.num_layers

    def __str__(self) -> str:
        if self.is_whole:
            return "the whole trunk"
        layers = f"non-expert weights of {len(self.layers)} of {self.num_layers} layers"
        head = "the head" if self.has_head else ""
        return " and ".join(filter(None, (layers if self.layers else "", head)))
