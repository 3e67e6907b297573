"""Owns the sampling options of a request and their limits. Knows no logits, tokenizer or vocabulary.

`sampler.Sampler` checks ids against the vocabulary.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final

from thermocline.errors import RequestError
from thermocline.sampling.constraint import Constraint, ReasoningBudget
from thermocline.wording import ShowsChanges, unknown_name

MAX_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIAS_ENTRIES: Final = 1024
MAX_BAD_SEQUENCES: Final = 256
_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1


def _no_bias() -> Mapping[int, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, repr=False)
class SamplingParams(ShowsChanges):
    """How to choose tokens, and when to stop. Anything out of range is a `RequestError` naming the field.

    max_tokens          most tokens to generate, 0 = none; None = the rest of the context
    temperature         0..2; 0 (the default) = greedy: the most likely token, filters are not used
    top_k               keep the k most likely; 0 = off
    top_p               (0, 1]: keep the fewest most likely tokens that hold this share; 1 = off
    min_p               0..1: drop tokens less likely than this share of the most likely; 0 = off
    typical_p           (0, 1]: keep the tokens of most typical surprise that hold this share; 1 = off
    repetition_penalty  0.1..2: over the last `repeat_last_n` tokens of prompt and output; 1 = off
    repeat_last_n       how far back that looks, in tokens; 0 = nowhere, -1 = the whole sequence
    presence_penalty    -2..2: subtracted once from each token of the output
    frequency_penalty   -2..2: subtracted from each token of the output, times its count
    logit_bias          token id -> -100..100, added to the logits; at most 1024 entries
    seed                int64; None = a new random seed for each request
    stop                at most 16 strings of 1..256 characters that end the answer, or a single one
    stop_token_ids      at most 256 token ids that end the answer
    ignore_eos          continue after the model's own end tokens (they are not masked)
    min_tokens          no end token and no stop token before this many tokens
    bad_token_sequences  at most 256 sequences of token ids that the answer may not hold
    include_stop_str_in_output  the stop string that ended the answer is a part of it
    skip_special_tokens  control tokens add nothing to the text
    shown_token_ids     control tokens that add their text even so: marks that a reader looks for
    constraint          the form of the answer; None = any. The answer ends when it is fulfilled. Before that,
                        only stop strings, stop tokens and max_tokens end it
    reasoning_budget    how long the model may reason; None = as long as it likes
    logprobs            None = off; k = the chosen token's and the k most likely tokens', 0..20
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=_no_bias)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    constraint: Constraint | None = None
    reasoning_budget: ReasoningBudget | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, getattr(self, name), "true or false")
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise _refused("constraint", self.constraint, "a Constraint")
        # Frozen copies, so that later changes of the caller's list or dict have no effect.
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids(self.stop_token_ids))
        _check_count("bad_token_sequences", self.bad_token_sequences, MAX_BAD_SEQUENCES)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: lower it",
                param="min_tokens",
            )

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1


def with_fields(params: SamplingParams | None, values: Mapping[str, object]) -> SamplingParams:
    """Return `params` (None: the defaults) with some fields changed. Raises RequestError, also for an unknown name."""
    base = params or SamplingParams()
    known = {each.name for each in fields(SamplingParams)}
    for name in values:
        if name not in known:
            raise RequestError(unknown_name(name, known, "setting of an answer"), param=name)
    changed: dict[str, Any] = dict(values)
    return replace(base, **changed) if values else base


def _check_numbers(params: SamplingParams) -> None:
    """Raise for the first number of `params` that is of the wrong type or out of its range."""
    for name, low, high, optional in (
        ("max_tokens", 0, _INT64_MAX, True),
        ("min_tokens", 0, _INT64_MAX, False),
        ("top_k", 0, _INT64_MAX, False),
        ("repeat_last_n", -1, _INT64_MAX, False),
        ("seed", _INT64_MIN, _INT64_MAX, True),
        ("logprobs", 0, MAX_LOGPROBS, True),
    ):
        value = getattr(params, name)
        if not ((optional and value is None) or _is_int_within(value, low, high)):
            raise _refused(name, value, f"an integer in {low}..{high}")
    for name, low_f, high_f, low_open in (
        ("temperature", 0.0, 2.0, False),
        ("top_p", 0.0, 1.0, True),
        ("min_p", 0.0, 1.0, False),
        ("typical_p", 0.0, 1.0, True),
        ("repetition_penalty", 0.1, 2.0, False),
        ("presence_penalty", -2.0, 2.0, False),
        ("frequency_penalty", -2.0, 2.0, False),
    ):
        value = getattr(params, name)
        if not _is_number_within(value, low_f, high_f) or (low_open and value == low_f):
            above = f"above {low_f:g} and at most {high_f:g}"
            raise _refused(
                name, value, f"a number {above if low_open else f'in {low_f:g}..{high_f:g}'}"
            )


def _checked_bias(bias: object) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise _refused("logit_bias", bias, "a mapping from token id to number")
    _check_count("logit_bias", bias, MAX_LOGIT_BIAS_ENTRIES)
    for token_id, value in bias.items():
        if not _is_int_within(token_id, 0, _INT64_MAX):
            raise _refused("logit_bias", token_id, "keyed by token ids, integers from 0 on")
        if not _is_number_within(value, -100.0, 100.0):
            raise _refused("logit_bias", value, "a number in -100..100 for each token")
    return MappingProxyType(dict(bias))


def _checked_stop(stop: object) -> tuple[str, ...]:
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, tuple | list):
        raise _refused("stop", stop, "a string or a tuple of strings")
    _check_count("stop", stop, MAX_STOP_STRINGS, "strings")
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise _refused("stop", text, f"strings of 1..{MAX_STOP_CHARS} characters")
    return tuple(stop)


def _checked_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, tuple | list):
        raise _refused("stop_token_ids", ids, "a tuple of token ids")
    _check_count("stop_token_ids", ids, MAX_STOP_TOKEN_IDS)
    for token_id in ids:
        if not _is_int_within(token_id, 0, _INT64_MAX):
            raise _refused("stop_token_ids", token_id, "token ids, integers from 0 on")
    return tuple(ids)


def _check_count(name: str, values: Sized, limit: int, what: str = "entries") -> None:
    if len(values) > limit:
        raise RequestError(f"{name} has {len(values)} {what}: give at most {limit}", param=name)


def _is_int_within(value: object, low: int, high: int) -> bool:
    """True for an int in low..high; a bool is not an int here."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number_within(value: object, low: float, high: float) -> bool:
    """True for a finite int or float in low..high; a bool is not a number here."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return low <= value <= high and math.isfinite(value)


def _refused(name: str, value: object, wanted: str) -> RequestError:
    try:
        shown = reprlib.repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        shown = "an integer of thousands of digits"
    return RequestError(f"{name} is {shown}: it must be {wanted}", param=name)
