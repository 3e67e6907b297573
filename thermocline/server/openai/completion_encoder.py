"""Encodes text_completion, whose chunks have the same name. Pure."""

from __future__ import annotations

import codecs
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from thermocline.server.core.steps import AnswerStep, PromptStep
from thermocline.server.openai.bodies import CompletionChoice, CompletionLogprobs
from thermocline.server.openai.encoder import OpenAIEncoder, known_logprob
from thermocline.text.pieces import TextPiece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from thermocline.messages import TokenLogprob
    from thermocline.server.core.generation_jobs import GenerationJob
    from thermocline.server.core.steps import GenerationStep
    from thermocline.server.openai.bodies import ChoiceBody
    from thermocline.server.openai.encoder import EncoderOptions, ServedModel, TokenDecoder


class CompletionEncoder(OpenAIEncoder):
    """text_completion, whose chunks have the same name."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self,
        served: ServedModel,
        job: GenerationJob,
        options: EncoderOptions,
        *,
        echoes: bool = False,
    ) -> None:
        """echoes: the text begins with the prompt."""
        super().__init__(served, job, options)
        self._echoes = echoes
        self._texts = [self._text() for _ in range(job.num_choices)]
        self._echoes_left: dict[int, str] = {}
        self._whole_texts: defaultdict[int, list[str]] = defaultdict(list)
        self._logprob_texts: defaultdict[int, list[list[bytes]]] = defaultdict(list)
        """For each step the four lists, encoded as they come: as objects they take ten times the memory."""

    def read_prompts(self, still_wanted: Callable[[], None]) -> None:
        """Write out the prompts that answers begin with, before any step: not for an event loop."""
        for choice in range(self._job.num_choices if self._echoes else 0):
            still_wanted()
            prompt = self._job.prompts[choice // self._job.n]
            is_scored = self._job.prompt_logprobs is not None
            text = self._text() if is_scored else self._texts[choice]
            self._echoes_left[choice] = text.skip(prompt)

    def _pieces(self, step: AnswerStep) -> list[ChoiceBody]:
        text = "".join([self._echo(step.choice), *_texts((step,))])
        shows_ids = self._options.return_token_ids and step.token_ids
        if not (text or step.logprobs or shows_ids):
            return []
        choice = CompletionChoice(step.choice, text, self._logprobs(step))
        if shows_ids:
            choice.token_ids = list(step.token_ids)
        return [choice]

    def _prompt_pieces(self, step: PromptStep) -> list[ChoiceBody]:
        """Return the prompt's text with its first log-probabilities, and then the other log-probabilities."""
        if self._job.prompt_logprobs is None or not (step.logprobs or step.first == 1):
            return []
        return [CompletionChoice(step.choice, self._echo(step.choice), self._logprobs(step))]

    def _nothing(self, index: int) -> ChoiceBody:
        return CompletionChoice(index, "")

    def _take(self, step: GenerationStep) -> int:
        texts = [self._echo(step.choice)]
        if isinstance(step, AnswerStep):
            texts += _texts((step,))
        self._whole_texts[step.choice] += texts
        lists: list[bytes] = []
        if (logprobs := self._logprobs(step)) is not None:
            lists = [msgspec.json.encode(part)[1:-1] for part in msgspec.structs.astuple(logprobs)]
            self._logprob_texts[step.choice].append(lists)
        return sum(map(len, texts)) + sum(map(len, lists))

    def _whole_choice(self, index: int, reason: str) -> ChoiceBody:
        logprobs = None
        if steps := self._logprob_texts.pop(index, None):
            lists: Any = (
                msgspec.Raw(b"[%b]" % b",".join(parts)) for parts in zip(*steps, strict=True)
            )
            logprobs = CompletionLogprobs(*lists)
        return CompletionChoice(index, "".join(self._whole_texts.pop(index)), logprobs, reason)

    def _echo(self, choice: int) -> str:
        """Return the text before an answer's text, once."""
        return self._echoes_left.pop(choice, "")

    def _text(self) -> _Text:
        strips = self._echoes and self._vocabulary.add_space_prefix
        return _Text(self._vocabulary, strips_space=strips)

    def _logprobs(self, step: GenerationStep) -> CompletionLogprobs | None:
        chosen: list[TokenLogprob | int] = []
        tops: list[tuple[TokenLogprob, ...] | None] = []
        if isinstance(step, PromptStep) and step.first == 1:
            # A prompt's first token has no log-probability.
            chosen.append(self._job.prompts[step.choice // self._job.n][0])
            tops.append(None)
        chosen += step.logprobs
        tops += step.top_logprobs
        if not chosen:
            return None
        ids = [token if isinstance(token, int) else token.token_id for token in chosen]
        text = self._texts[step.choice]
        offsets = [text.push(token_id)[0] for token_id in ids]
        return CompletionLogprobs(
            [self._token_text(token_id) for token_id in ids],
            [None if isinstance(token, int) else known_logprob(token.logprob) for token in chosen],
            [None if top is None else self._by_text(top) for top in tops],
            offsets,
        )

    def _token_text(self, token_id: int) -> str:
        return _token_text(self._vocabulary.token_bytes(token_id))

    def _by_text(self, top: Iterable[TokenLogprob]) -> dict[str, float]:
        """Return the likeliest tokens by text; of two with the same text, the likelier."""
        by_text: dict[str, float] = {}
        for other in top:
            by_text.setdefault(self._token_text(other.token_id), known_logprob(other.logprob))
        return by_text


def _token_text(raw: bytes) -> str:
    """Return a token as text, in OpenAI's notation where it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class _Text:
    """The characters of one text, token by token.

    strips_space: leave out the space that the tokenizer put before the text.
    """

    def __init__(self, vocabulary: TokenDecoder, *, strips_space: bool) -> None:
        self._vocabulary = vocabulary
        self._strips_space = strips_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def push(self, token_id: int) -> tuple[int, str]:
        """Add the text's next token; return the number of characters before it, and its characters."""
        offset, text = self._num_chars, ""
        if not self._vocabulary.is_control(token_id):
            raw = self._vocabulary.token_bytes(token_id)
            text = self._decoder.decode(raw.removeprefix(b" ") if self._strips_space else raw)
            self._strips_space = False
            self._num_chars += len(text)
        return offset, text

    def skip(self, token_ids: Iterable[int]) -> str:
        """Add the first tokens of the text, and return their characters."""
        return "".join([self.push(token_id)[1] for token_id in token_ids])


def _texts(steps: Iterable[AnswerStep]) -> list[str]:
    return [piece.text for step in steps for piece in step.pieces if isinstance(piece, TextPiece)]
