"""Says which tokens take the expanded form of latent attention, and how a prompt is cut so that the form pays.

Pure. A token's form depends on its position and on the length of its prompt alone: never on chunks, on what is found
computed, or on other requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.pipeline.scheduling.request import Request


def num_expanded(num_prompt_tokens: int, expanded_tokens: int) -> int:
    """Return how many first tokens of a prompt take the expanded form: all of its whole cells of `expanded_tokens`.

    The rest takes the absorbed form, as answers do. So the prompt of a later turn finds the answers before it computed,
    but for those in cells that it is the first to fill.
    """
    return num_prompt_tokens // expanded_tokens * expanded_tokens if expanded_tokens else 0


def prefill_end(request: Request, budget: int, cell: int) -> int:
    """Return the end of a request's next prefill chunk of about `budget` tokens.

    Keys and values of the whole context are made for each chunk with expanded tokens, so that it ends with a cell of
    theirs, and has one at least. cell: tokens of one, or the most that a chunk may have.
    """
    start, expanded = request.scheduled, request.cache.num_expanded
    end = min(request.num_prompt_tokens, start + budget)
    if start >= expanded or end >= expanded:
        return end
    next_cell = start // cell * cell + cell
    return min(expanded, max(next_cell, end // cell * cell))
