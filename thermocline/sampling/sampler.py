"""Chooses one token of one request. Knows no batch, no text and no stop condition.

A `Sampler` does not remember its choices. The draw at output position n depends only on the seed and n, and
constraint and penalties depend only on the tokens passed in. So preemption, batching, and rolling drafted
tokens back can not change an answer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import EngineError, RequestError
from thermocline.messages import TokenLogprob
from thermocline.sampling import logits as maths

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from thermocline.sampling.matcher import Matcher
    from thermocline.sampling.params import SamplingParams
    from thermocline.sampling.reasoning_limit import ReasoningLimit

_UINT64_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token.

    logprob  of the chosen token, None unless asked for
    top      the most likely tokens, best first, as many as asked for, without impossible ones; the chosen
             token is not always one of them

    Log-probabilities are log-softmax of the model's logits before bias, penalties, temperature and filters.
    """

    token_id: int
    logprob: float | None
    top: tuple[TokenLogprob, ...]


class Sampler:
    """Chooses the tokens of one request by its `SamplingParams`, in the order of `logits`' docstring.

    Greedy choice takes the greatest processed logit, the lowest id among equals. Before `min_tokens` tokens,
    `end_ids` (the model's end tokens) and `params.stop_token_ids` are impossible, unless nothing else is
    possible; so are `never_ids` at all times. Without `params.seed` each sampler draws its own seed. matcher: for
    `params.constraint`; `ignore_eos` then means that the answer ends as late as the constraint allows. limit: for
    `params.reasoning_budget`; its forced tokens are neither masked nor drawn. Raises RequestError for an id
    outside of the vocabulary. `sample` may run in any thread, one call at a time.
    """

    __slots__ = (
        "_bias", "_bias_ids", "_end_ids", "_late_ids", "_limit", "_matcher", "_never_ids", "_params", "_prompt_tail",
        "_vocab_size", "seed",
    )  # fmt: skip

    seed: int

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        end_ids: Collection[int],
        prompt_ids: Sequence[int],
        never_ids: Collection[int] = (),
        matcher: Matcher | None = None,
        limit: ReasoningLimit | None = None,
    ) -> None:
        _check_ids("logit_bias", params.logit_bias, vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        for ids in params.bad_token_sequences:
            _check_ids("bad_token_sequences", ids, vocab_size)
        assert all(0 <= token_id < vocab_size for token_id in end_ids)
        self._params = params
        self._matcher = matcher
        self._limit = limit
        self._vocab_size = vocab_size
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._end_ids = np.array(sorted(end_ids), dtype=np.int64)
        self._late_ids = np.array(sorted({*end_ids, *params.stop_token_ids}), dtype=np.int64)
        self._never_ids = np.array(sorted(never_ids), dtype=np.int64)
        tail = _last(prompt_ids, params.repeat_last_n) if _repetition_is_on(params) else ()
        _check_ids("prompt", tail, vocab_size)
        self._prompt_tail = np.array(tail, dtype=np.int64)
        self.seed = _random_seed() if params.seed is None else params.seed

    def __repr__(self) -> str:
        return f"Sampler(seed={self.seed}, vocab_size={self._vocab_size}, params={self._params})"

    def sample(self, logits: maths.Logits, output_ids: Sequence[int]) -> Sampled:
        """Return the token that follows `output_ids`, the request's output so far without the prompt.

        logits: float32 [V] of the model, not changed; -inf marks impossible tokens. Raises EngineError if they
        contain NaN or +inf, or only -inf.
        """
        assert logits.shape == (self._vocab_size,), logits.shape
        assert logits.dtype == np.float32, logits.dtype
        best = int(logits.argmax())  # the first NaN, if there is one
        if not np.isfinite(logits[best]):
            raise _not_usable(logits)
        forced = None if self._limit is None else self._limit.forced(output_ids)
        if forced is None:
            row = self._processed(logits, output_ids)
            is_plain = row is logits and self._params.is_greedy
            token_id = best if is_plain else self._choose(row, len(output_ids))
        else:
            token_id = forced
        if self._params.logprobs is None:
            return Sampled(token_id, logprob=None, top=())
        normaliser = maths.log_normaliser(logits)
        top_ids = maths.most_likely(logits, self._params.logprobs)
        return Sampled(
            token_id,
            logprob=float(logits[token_id]) - normaliser,
            top=tuple(TokenLogprob(int(i), float(logits[i]) - normaliser) for i in top_ids),
        )

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        """Whether the constraint allows no token after `output_ids`, so the answer has ended."""
        return self._matcher is not None and self._matcher.is_complete(output_ids)

    def num_possible(self, output_ids: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of `tokens` the constraint allows after `output_ids`, one after another; all without one."""
        if self._matcher is None:
            return len(tokens)
        return self._matcher.num_possible(output_ids, tokens)

    def _processed(self, logits: maths.Logits, output_ids: Sequence[int]) -> maths.Logits:
        """Return `logits` after constraint, bias, penalties and minimum length; the same array if none applies."""
        params = self._params
        penalise_output = len(output_ids) > 0 and (
            params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        forbidden = self._forbidden_ids(output_ids)
        repetition = _repetition_is_on(params)
        if self._matcher is not None:
            row = self._matcher.masked(logits, output_ids)
        elif len(self._bias_ids) or repetition or penalise_output or len(forbidden):
            row = logits.copy()
        else:
            return logits
        maths.add_bias(row, self._bias_ids, self._bias)
        if repetition:
            maths.penalise_repetition(row, self._window(output_ids), params.repetition_penalty)
        if penalise_output:
            maths.penalise_output(
                row,
                output_ids,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
            )
        if len(forbidden):
            maths.forbid(row, forbidden)
        return row

    def _forbidden_ids(self, output_ids: Sequence[int]) -> maths.TokenIds:
        """Return the tokens that would end the answer too early or complete a forbidden sequence, and those of no answer."""
        params = self._params
        if len(output_ids) < params.min_tokens:
            early = self._late_ids
        elif self._matcher is not None and params.ignore_eos:
            early = self._end_ids
        else:
            early = self._end_ids[:0]
        bad = [
            ids[-1]
            for ids in params.bad_token_sequences
            if tuple(_last(output_ids, len(ids) - 1)) == ids[:-1]
        ]
        if not bad and not len(self._never_ids):
            return early
        return np.concatenate((early, np.array(bad, dtype=np.int64), self._never_ids))

    def _choose(self, row: maths.Logits, position: int) -> int:
        """Return the greedy token of `row`, or the drawn one."""
        params = self._params
        if params.is_greedy:
            return int(row.argmax())
        candidates = maths.candidates_at(row, params.temperature, top_k=params.top_k)
        if params.typical_p < 1:
            candidates = maths.keep_typical_p(candidates, params.typical_p)
        if params.top_p < 1:
            candidates = maths.keep_top_p(candidates, params.top_p)
        if params.min_p > 0:
            candidates = maths.keep_min_p(candidates, params.min_p)
        return maths.draw(candidates, uniform_at(self.seed, position))

    def _window(self, output_ids: Sequence[int]) -> maths.TokenIds:
        """Return the last `repeat_last_n` tokens of prompt and output."""
        count = self._params.repeat_last_n
        recent = np.array(_last(output_ids, count), dtype=np.int64)
        missing = len(self._prompt_tail) if count < 0 else count - len(recent)
        return np.concatenate((_last(self._prompt_tail, missing), recent))


def uniform_at(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) for an output position and a seed (int64).

    The seed is the key of a Philox generator and the position its counter, so no earlier position has to be
    drawn first.
    """
    generator = np.random.Philox(key=seed & _UINT64_MASK, counter=position << 64)
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def _random_seed() -> int:
    return int.from_bytes(os.urandom(8), "little", signed=True)


def _repetition_is_on(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 and params.repeat_last_n != 0


def _last(values: Sequence[int] | maths.TokenIds, count: int) -> Sequence[int] | maths.TokenIds:
    """Return the last `count` values, all of them if `count` is negative."""
    return values if count < 0 else values[max(0, len(values) - count) :]


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} names token {token_id}, but the model's ids are 0..{vocab_size - 1}",
                param=param,
            )


def _not_usable(logits: maths.Logits) -> EngineError:
    num_nan = int(np.isnan(logits).sum())
    return EngineError(
        f"the model's logits are not usable: {num_nan} of {len(logits)} are NaN, the greatest is "
        f"{np.nanmax(logits) if num_nan < len(logits) else 'NaN'}. Check the model file's checksum; "
        "if the file is good, this is a defect of a kernel"
    )
