"""The answer to one request: sampling, detokenizing, stop strings, timings.

Decides when the answer's content ends a request. Knows no scheduler and no chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import ReaderTooSlowError
from thermocline.messages import (
    DraftFigures,
    FinishReason,
    PromptEmbedding,
    PromptLogits,
    PromptProgress,
    RequestFailed,
    Timings,
    TokenEvent,
    TokenLogprob,
)
from thermocline.pipeline.pooling import Pooler
from thermocline.sampling.reasoning_limit import ReasoningLimit
from thermocline.sampling.sampler import Sampler
from thermocline.text.detokenizer import Detokenizer
from thermocline.text.stops import StopMatcher
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.errors import ThermoclineError
    from thermocline.messages import ExpertIds, FloatArray, RequestId, RequestOptions
    from thermocline.pipeline.mailbox import Mailbox
    from thermocline.sampling.constraint import ReasoningBudget
    from thermocline.sampling.matcher import Matcher
    from thermocline.sampling.params import SamplingParams
    from thermocline.text.tokenizer import Tokenizer
    from thermocline.traces.clock import Clock
    from thermocline.traces.recorder import Recorder


class Generation:
    """The state of one answer. Methods run on the engine's thread and publish their events to the mailbox."""

    def __init__(  # noqa: PLR0913 - everything that one request needs, built in one place
        self,
        request: RequestId,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        mailbox: Mailbox,
        recorder: Recorder,
        clock: Clock,
        options: RequestOptions,
        matcher: Matcher | None = None,
    ) -> None:
        """matcher: for the constraint in `params`, if there is one."""
        self.request = request
        self.options = options
        self.prompt = tuple(prompt)
        self.params = params
        self.max_new_tokens = 0
        """Set once, when the scheduler accepts the request."""
        self.drafts = DraftFigures()
        """What speculation did for it so far; `Drafting` sets it."""
        self._sampler = Sampler(
            params,
            vocab_size=tokenizer.vocab_size,
            end_ids=tokenizer.end_ids,
            never_ids=tokenizer.never_ids,
            prompt_ids=self.prompt,
            matcher=matcher,
            limit=_reasoning_limit(params.reasoning_budget, tokenizer),
        )
        self._vocab_size = tokenizer.vocab_size
        self._end_ids = frozenset(params.stop_token_ids)
        if matcher is not None or not params.ignore_eos:
            self._end_ids |= tokenizer.end_ids
        self._detokenizer = Detokenizer(
            tokenizer,
            show_control=not params.skip_special_tokens,
            shown=params.shown_token_ids,
        )
        self._stops = StopMatcher(params.stop)
        self._mailbox = mailbox
        self._recorder = recorder
        self._clock = clock
        self._output: list[int] = []
        self._routing: list[tuple[int, ExpertIds]] = []
        self._pooler = None if options.pooling is None else Pooler(options.pooling)
        self._num_cached = 0
        self._num_prompt_computed = 0
        self._submitted_ns = clock.now_ns()
        self._started_ns: int | None = None
        self._first_token_ns: int | None = None
        self._span_start_ns = recorder.now_ns()

    def __repr__(self) -> str:
        return f"Generation({self.request}, {len(self.prompt)} + {len(self._output)} tokens)"

    @property
    def has_started(self) -> bool:
        """Whether its first chunk was sent."""
        return self._started_ns is not None

    def start(self, num_cached: int) -> None:
        """Note that the first chunk is being sent, and how many tokens before it came from the prefix cache."""
        self._started_ns = self._clock.now_ns()
        self._num_cached = num_cached

    def prompt_computed(
        self, num_computed: int, logits: FloatArray, states: FloatArray | None = None
    ) -> None:
        """Report that the prompt's first `num_computed` tokens are computed, unless that was reported before.

        logits, states: one row for each of the last of these tokens.
        """
        if self._num_prompt_computed >= num_computed:
            return
        self._num_prompt_computed = num_computed
        if self.options.wants_prompt_logits:
            self._mailbox.put(PromptLogits(self.request, num_computed - len(logits), logits))
        if self._pooler is not None and states is not None:
            self._pooler.push(states)
            if num_computed == len(self.prompt):
                self._mailbox.put(PromptEmbedding(self.request, self._pooler.vector()))
        self._report_prompt(num_computed)

    def prompt_under_way(self, first: int, num_done: int) -> None:
        """Report that a chunk from position `first` on has done work worth `num_done` tokens.

        Not if other chunks are still in front of it: no later report may say less.
        """
        if first <= max(self._num_prompt_computed, self._num_cached) < first + num_done:
            self._report_prompt(first + num_done)

    def _report_prompt(self, num_computed: int) -> None:
        took_s = (self._clock.now_ns() - (self._started_ns or 0)) * 1e-9
        total, cached = len(self.prompt), self._num_cached
        self._mailbox.put(PromptProgress(self.request, num_computed, total, cached, took_s))

    def routed(self, start: int, chosen: ExpertIds) -> None:
        """Note the experts chosen for the tokens from position `start` on."""
        self._routing.append((start, chosen))

    @property
    def num_known(self) -> int:
        """Tokens of its prompt, and of its answer so far."""
        return len(self.prompt) + len(self._output)

    def num_possible(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a draft may follow the answer so far: others can not be chosen, or end it."""
        for count, token_id in enumerate(tokens):
            if not 0 <= token_id < self._vocab_size or token_id in self._end_ids:
                tokens = tokens[:count]
                break
        return self._sampler.num_possible(self._output, tokens)

    def advance(self, logits: FloatArray) -> int | None:
        """Sample the next token from float32 [V] and publish it. Return None if it ended the request."""
        sampled = self._sampler.sample(logits, self._output)
        token_id = sampled.token_id
        self._output.append(token_id)
        self._note_first_token()
        ended = token_id in self._end_ids
        stopped = self._stops.push("" if ended else self._detokenizer.push(token_id))
        reason = None
        if ended or stopped.matched is not None or self._sampler.is_complete(self._output):
            reason = FinishReason.STOP
        elif len(self._output) >= self.max_new_tokens:
            reason = FinishReason.LENGTH
        text = stopped.text
        if reason is not None and stopped.matched is None:
            text += self._remaining_text()
        elif stopped.matched is not None and self.params.include_stop_str_in_output:
            text += stopped.matched
        chosen: tuple[TokenLogprob, ...] = ()
        if sampled.logprob is not None:
            chosen = (TokenLogprob(token_id, sampled.logprob),)
        event = TokenEvent(
            self.request,
            (token_id,),
            text,
            logprobs=chosen,
            top_logprobs=(sampled.top,) if chosen else (),
            finish_reason=reason,
            stop=stopped.matched,
            timings=self._timings() if reason or self.options.wants_timings else None,
            routing=self._all_routing() if reason else None,
        )
        if reason is not None:
            self._publish_end(event)
            return None
        self._mailbox.put(event)
        if self._mailbox.is_overfull:
            self.fail(
                ReaderTooSlowError(
                    f"the reader is too far behind, {len(self._output)} tokens into the answer: read "
                    "faster, or ask for fewer log-probabilities"
                )
            )
            return None
        return token_id

    def end(self, reason: FinishReason) -> None:
        """Publish the terminal event without a new token."""
        text = self._remaining_text() if self._output else ""
        timings, routing = self._timings(), self._all_routing()
        self._publish_end(
            TokenEvent(
                self.request, (), text, finish_reason=reason, timings=timings, routing=routing
            )
        )

    def fail(self, error: ThermoclineError) -> None:
        """Publish the terminal event of a failure."""
        self._publish_end(RequestFailed(self.request, error))

    def _publish_end(self, event: TokenEvent | RequestFailed) -> None:
        if self._recorder.enabled:
            start_ns, end_ns = self._span_start_ns, self._recorder.now_ns()
            args = {"request": self.request, "prompt_tokens": len(self.prompt)}
            args["output_tokens"] = len(self._output)
            self._recorder.async_span(Name.REQUEST, self.request, start_ns, end_ns, args)
        self._mailbox.put(event)

    def _remaining_text(self) -> str:
        return self._stops.push(self._detokenizer.flush()).text + self._stops.flush().text

    def _all_routing(self) -> ExpertIds | None:
        if not self._routing:
            return None
        # Tokens computed again after a preemption have the same routing.
        _, last = self._routing[-1]
        num_tokens = max(start + len(chosen) for start, chosen in self._routing)
        whole = np.full((num_tokens, *last.shape[1:]), -1, np.int16)
        for start, chosen in self._routing:
            whole[start : start + len(chosen)] = chosen
        # Behind the answer are drafted tokens that were taken back. Others were overwritten since.
        return whole[: max(len(self.prompt), self.num_known - 1)]

    def _note_first_token(self) -> None:
        if self._first_token_ns is None:
            self._first_token_ns = self._clock.now_ns()
            if self._recorder.enabled:
                at_ns, args = self._recorder.now_ns(), {"request": self.request}
                self._recorder.instant(Lane.REQUESTS, Name.FIRST_TOKEN, at_ns, args)

    def _timings(self) -> Timings:
        now = self._clock.now_ns()
        started = now if self._started_ns is None else self._started_ns
        first = now if self._first_token_ns is None else self._first_token_ns
        return Timings(
            queue_s=(started - self._submitted_ns) * 1e-9,
            prompt_s=(first - started) * 1e-9,
            decode_s=(now - first) * 1e-9,
            num_prompt_tokens=len(self.prompt),
            num_output_tokens=len(self._output),
            num_cached_tokens=self._num_cached,
            drafts=self.drafts,
        )


def _reasoning_limit(budget: ReasoningBudget | None, tokenizer: Tokenizer) -> ReasoningLimit | None:
    if budget is None:
        return None
    closing_ids = tokenizer.encode_more(budget.closing, parse_special=True)
    return ReasoningLimit(budget, closing_ids, tokenizer.token_bytes)
