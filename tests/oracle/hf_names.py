"""Names of tensors in a file and in transformers' models."""

from __future__ import annotations

import numpy as np

State = dict[str, np.ndarray]


def renamed(own: State, names: dict[str, str]) -> State:
    """Return the tensors whose names begin with one of ours, by their names."""
    return {
        theirs + name.removeprefix(ours): values
        for name, values in own.items()
        for ours, theirs in names.items()
        if name.startswith(ours)
    }
