"""Checks a prompt that is given as token ids. Pure."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from thermocline.errors import PromptTooLongError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence


def checked_prompt(token_ids: Sequence[int], vocab_size: int, max_context_tokens: int) -> list[int]:
    """Return the ids as plain integers. Raises RequestError, of a prompt too long PromptTooLongError."""
    if len(token_ids) == 0:
        raise RequestError("the prompt is empty: give at least one token", param="prompt")
    if len(token_ids) > max_context_tokens:
        # First, so that a prompt of millions of ids costs the caller's loop nothing.
        raise PromptTooLongError(len(token_ids), max_context_tokens)
    checked = []
    for token_id in token_ids:
        try:
            # Integers of any kind, NumPy's included; True is a slip, not token 1.
            checked.append(operator.index(token_id))
            is_integer = not isinstance(token_id, bool)
        except TypeError:
            is_integer = False
        if not is_integer:
            raise RequestError(
                f"a prompt token is {token_id!r}: give integers from 0 to {vocab_size - 1}",
                param="prompt",
            )
        if not 0 <= checked[-1] < vocab_size:
            raise RequestError(
                f"prompt token {token_id} is outside of the vocabulary: give 0 to {vocab_size - 1}",
                param="prompt",
            )
    return checked
