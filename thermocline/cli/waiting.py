"""What a person reads who waits for a model to open, or for a prompt to be read. Knows no screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from thermocline.engine.context import EngineContext
    from thermocline.messages import PromptProgress

_STEPS: Final = {
    "file": "reading the header",
    "weights": "mapping the weights",
    "tokenizer": "building the tokenizer, looking for a GPU",
    "experts": "placing experts, warming up",
}
# Before that a rate says little.
_FIRST_S: Final = 0.2


def opening_line(name: str, opening: EngineContext, began_s: float) -> str:
    """Return which step of opening is under way, and since when; began_s: by time.monotonic."""
    step = opening.load_step
    if step is None:
        return f"opening {name}"
    number = list(_STEPS).index(step) + 1
    waited_s = time.monotonic() - began_s
    return f"opening {name}: {_STEPS[step]} (step {number} of {len(_STEPS)}, {waited_s:.0f} s)"


def prompt_line(progress: PromptProgress) -> str:
    """Return how much of a prompt is read, how fast, and how long the rest will take."""
    done, total = progress.num_computed, progress.num_total
    line = f"reading the prompt: {done} of {total} tokens"
    num_computed = done - progress.num_cached
    if progress.elapsed_s < _FIRST_S or num_computed <= 0:
        return line
    rate = num_computed / progress.elapsed_s
    return f"{line}, {rate:.0f} tokens/s, {time_left((total - done) / rate)}"


def time_left(seconds: float) -> str:
    """Return a time to come as people say it."""
    return f"{seconds:.0f} s left" if seconds < 90 else f"{seconds / 60:.0f} min left"
