"""Prometheus' text format: families of samples, histograms, and the writer.

Pure; knows no engine and no HTTP.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One number. suffix: appended to the family's name; labels: names and values."""

    value: float
    labels: tuple[tuple[str, str], ...] = ()
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """Samples of one name."""

    name: str
    kind: MetricKind
    help: str
    samples: tuple[Sample, ...]


class Histogram:
    """Counts observations by upper bound; an observation costs a bisection."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def __len__(self) -> int:
        """The number of observations."""
        return sum(self._counts)

    @property
    def mean(self) -> float:
        """Mean of the observations, 0 without any."""
        return self._sum / len(self) if len(self) else 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, help_text: str) -> Family:
        """Return the samples under `name`."""
        samples, total = [], 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            samples.append(Sample(total, (("le", _number(bound)),), "_bucket"))
        samples += Sample(self._sum, suffix="_sum"), Sample(total, suffix="_count")
        return Family(name, "histogram", help_text, tuple(samples))


def counter(name: str, help_text: str, value: float) -> Family:
    """Return a family of one counter."""
    return Family(name, "counter", help_text, (Sample(value),))


def gauge(name: str, help_text: str, value: float) -> Family:
    """Return a family of one gauge."""
    return Family(name, "gauge", help_text, (Sample(value),))


def labelled(
    name: str, kind: MetricKind, help_text: str, label: str, values: Mapping[str, float]
) -> Family:
    """Return a family with one number for each value of a label."""
    samples = (Sample(value, ((label, key),)) for key, value in values.items())
    return Family(name, kind, help_text, tuple(samples))


def with_label(family: Family, label: str, value: str) -> Family:
    """Return a family whose samples have one more label, in front of theirs."""
    samples = (
        Sample(each.value, ((label, value), *each.labels), each.suffix) for each in family.samples
    )
    return Family(family.name, family.kind, family.help, tuple(samples))


def joined(families: Iterable[Family]) -> list[Family]:
    """Return families of one name as one, where the first of them stands."""
    by_name: dict[str, Family] = {}
    for family in families:
        first = by_name.get(family.name)
        if first is not None:
            samples = (*first.samples, *family.samples)
            family = Family(family.name, family.kind, family.help, samples)
        by_name[family.name] = family
    return list(by_name.values())


def write(families: Iterable[Family], prefix: str) -> str:
    """Return the families as text, each name with `prefix`."""
    lines = []
    for family in families:
        name = prefix + family.name
        lines.append(f"# HELP {name} {family.help}")
        lines.append(f"# TYPE {name} {family.kind}")
        lines += [
            f"{name}{sample.suffix}{_labels(sample)} {_number(sample.value)}"
            for sample in family.samples
        ]
    return "\n".join(lines) + "\n"


def _labels(sample: Sample) -> str:
    if not sample.labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) else repr(value)
