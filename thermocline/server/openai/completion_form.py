"""Bodies of text_completion, whose chunks have the same name. Pure."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from thermocline.server.openai.bodies import CompletionChoice, CompletionLogprobs
from thermocline.server.openai.form import AnswerForm, known_logprob
from thermocline.server.steps import AnswerStep
from thermocline.text.pieces import TextPiece

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thermocline.server.answering import Ask
    from thermocline.server.openai.bodies import Choice
    from thermocline.server.openai.form import FormOptions, Served, Vocabulary
    from thermocline.server.steps import ChoiceEnd, Step


class CompletionForm(AnswerForm):
    """text_completion, whose chunks have the same name."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, served: Served, ask: Ask, options: FormOptions) -> None:
        super().__init__(served, ask, options)
        self._offsets = [_Offsets(served.vocabulary) for _ in range(ask.num_choices)]

    def _pieces(self, step: AnswerStep) -> list[Choice]:
        text = _text((step,))
        shows_ids = self._options.return_token_ids and step.token_ids
        if not (text or step.logprobs or shows_ids):
            return []
        choice = CompletionChoice(step.choice, text, self._logprobs((step,)))
        if shows_ids:
            choice.token_ids = list(step.token_ids)
        return [choice]

    def _finish(self, index: int, end: ChoiceEnd) -> Choice:
        return CompletionChoice(index, "", finish_reason=str(end.reason))

    def _nothing(self, index: int) -> Choice:
        return CompletionChoice(index, "")

    def _whole_choice(self, index: int, steps: Sequence[Step], end: ChoiceEnd) -> Choice:
        answer = [step for step in steps if isinstance(step, AnswerStep)]
        choice = CompletionChoice(index, _text(answer), self._logprobs(answer), str(end.reason))
        if self._options.return_token_ids:
            choice.token_ids = [token_id for step in answer for token_id in step.token_ids]
        return choice

    def _logprobs(self, steps: Sequence[AnswerStep]) -> CompletionLogprobs | None:
        chosen = [token for step in steps for token in step.logprobs]
        if not chosen:
            return None
        offsets = self._offsets[steps[0].choice]
        return CompletionLogprobs(
            [self._token_text(token.token_id) for token in chosen],
            [known_logprob(token.logprob) for token in chosen],
            [
                {self._token_text(other.token_id): known_logprob(other.logprob) for other in top}
                for step in steps
                for top in step.top_logprobs
            ],
            [offsets.next(token.token_id) for token in chosen],
        )


class _Offsets:
    """Counts the characters of one text token by token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def next(self, token_id: int) -> int:
        """Return the characters before this token, the next one of the text."""
        offset = self._num_chars
        if not self._vocabulary.is_control(token_id):
            self._num_chars += len(self._decoder.decode(self._vocabulary.token_bytes(token_id)))
        return offset


def _text(steps: Iterable[AnswerStep]) -> str:
    return "".join(
        piece.text for step in steps for piece in step.pieces if isinstance(piece, TextPiece)
    )
