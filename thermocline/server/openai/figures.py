"""Figures of answers: times, experts' figures, and the routing of each token. Pure."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET, UnsetType

from thermocline.server.openai.bodies import ExpertsBody, TimingsBody, timings_body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.server.core.steps import ChoiceEnd


def routed_experts(end: ChoiceEnd) -> str | UnsetType:
    """Return the experts of each token as base64 of a .npy file; UNSET if the request does not want them."""
    if end.routing is None:
        return UNSET
    file = io.BytesIO()
    np.save(file, end.routing, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def experts_body(ends: Sequence[ChoiceEnd]) -> ExpertsBody:
    """Return the figures of chosen experts; of several choices, the largest of each figure."""
    figures = [end.experts for end in ends if end.experts is not None]

    def most(name: str) -> int:
        return max((int(getattr(figure, name)) for figure in figures), default=0)

    return ExpertsBody(
        hits=most("hits"),
        misses=most("misses"),
        prefetched=most("prefetched"),
        cpu=most("cpu"),
        bytes_h2d=most("bytes_h2d"),
        bytes_disk=most("bytes_disk"),
        overlap_ratio=max((figure.overlap_ratio for figure in figures), default=0.0),
    )


def together(ends: Sequence[ChoiceEnd]) -> TimingsBody:
    """Return the timings of a request: sums of its choices' counts, and their longest times."""
    if len(ends) == 1:
        return timings_body(ends[0].timings, ends[0].ttft_s)
    bodies = [timings_body(end.timings, end.ttft_s) for end in ends]

    def total(name: str) -> int:
        return sum(int(getattr(body, name)) for body in bodies)

    def longest(name: str) -> float:
        return max(float(getattr(body, name)) for body in bodies)

    prompt_ms, predicted_ms = longest("prompt_ms"), longest("predicted_ms")
    return TimingsBody(
        cache_n=total("cache_n"),
        prompt_n=total("prompt_n"),
        prompt_ms=prompt_ms,
        prompt_per_second=_per_second(total("prompt_n"), prompt_ms),
        predicted_n=total("predicted_n"),
        predicted_ms=predicted_ms,
        predicted_per_second=_per_second(total("predicted_n"), predicted_ms),
        queue_ms=longest("queue_ms"),
        ttft_ms=longest("ttft_ms"),
        draft_n=total("draft_n"),
        draft_n_accepted=total("draft_n_accepted"),
        draft_off=bodies[0].draft_off,
    )


def _per_second(count: int, ms: float) -> float:
    return count / ms * 1e3 if ms else 0.0
