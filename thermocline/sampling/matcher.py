"""Which tokens a constraint allows next, by llguidance. Knows no sampling and no request.

Owns the compiled grammars of one vocabulary and the threads that compile.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import numpy as np

from thermocline.errors import EngineClosedError, RequestError
from thermocline.sampling.grammar import grammar_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from thermocline.sampling.constraint import Constraint
    from thermocline.sampling.logits import Logits

R = TypeVar("R")

_MAX_CACHED: Final = 32
_NUM_THREADS: Final = 2
# A compilation that takes longer is left to itself.
_JOIN_S: Final = 1.0
_MAX_MESSAGE_CHARS: Final = 300

# What one grammar may cost: about 10 ms for a step's work in the lexer, 20 MB of its states.
_STEP_FUEL: Final = 150_000
_MAX_ROW_ITEMS: Final = 10_000
_MAX_LEXER_STATES: Final = 20_000
_MAX_GRAMMAR_SIZE: Final = 200_000

# For each byte of a bit mask, what is added to the logits of its 8 tokens, the lowest bit first.
_ALLOWED_BITS: Final = np.arange(256)[:, None] >> np.arange(8) & 1
_PENALTIES: Final = np.where(_ALLOWED_BITS, np.float32(0), np.float32(-np.inf)).astype(np.float32)


class Vocabulary(Protocol):
    """What grammars need to know of a tokenizer."""

    vocab_size: int
    end_ids: frozenset[int]
    steering_ids: frozenset[int]
    """Tokens that steer the model: a grammar's text is never made of them."""

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token."""
        ...

    def encode_more(self, text: str) -> list[int]:
        """Token ids of `text` that goes on where other text ended."""
        ...


class Matcher:
    """Follows one answer through its constraint.

    What it holds is a cache of the tokens that it was asked about last: any other beginning may be
    asked about next, and the usual one, one token more, is the cheap one. Not thread-safe.
    """

    def __init__(self, compiled: Any, vocab_size: int, param: str) -> None:  # noqa: ANN401 - llguidance's
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._param = param
        self._consumed: list[int] = []
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._row = np.empty((len(self._bits) * 4, 8), dtype=np.float32)

    def __repr__(self) -> str:
        return f"Matcher({len(self._consumed)} tokens)"

    def masked(self, logits: Logits, output_ids: Sequence[int]) -> Logits:
        """Return `logits` [V] with all that may not follow `output_ids` at -inf.

        The result may be changed, and is valid until the next call. Raises RequestError when the
        grammar is too complex to go on, or allows only what the model finds impossible.
        """
        self._follow(output_ids)
        self._compiled.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        np.take(_PENALTIES, self._bits.view(np.uint8), axis=0, out=self._row, mode="clip")
        row = self._row.reshape(-1)[: self._vocab_size]
        np.add(logits, row, out=row)
        if np.isneginf(row.max()):
            raise self._failed("the grammar allows only tokens that the model finds impossible")
        return row

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        """Whether `output_ids` fulfil the constraint, and nothing may follow them."""
        self._follow(output_ids)
        return bool(self._compiled.is_stopped())

    def _follow(self, output_ids: Sequence[int]) -> None:
        """Be where `output_ids` lead."""
        known = len(self._consumed)
        if list(output_ids[:known]) != self._consumed:
            shared = _num_shared(self._consumed, output_ids)
            if not self._compiled.rollback(known - shared):
                self._compiled.reset()
                shared = 0
            del self._consumed[shared:]
        for token_id in output_ids[len(self._consumed) :]:
            self._compiled.consume_token(token_id)
            self._check()
            self._consumed.append(token_id)

    def _check(self) -> None:
        if self._compiled.is_error():
            raise self._failed(_reason(self._compiled.get_error()))

    def _failed(self, why: str) -> RequestError:
        return RequestError(
            f"{self._param} can not be held any longer: {why}. Ask for a simpler form",
            param=self._param,
        )


class Grammars:
    """Compiles constraints for one vocabulary, in threads of its own, and keeps the latest."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: Any = None
        self._cached: OrderedDict[Constraint, Any] = OrderedDict()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, constraint: Constraint) -> Future[Matcher]:
        """Have a matcher made, soon. Raises EngineClosedError after `close`.

        The future raises RequestError for a constraint that is not valid or not supported.
        """
        return self._post(lambda: self.matcher(constraint))

    def prepare(self) -> Future[Any]:
        """Have the vocabulary's table made, soon, if the model can be constrained."""
        return self._post(lambda: self._opened_tokenizer() if self._vocabulary.end_ids else None)

    def close(self) -> None:
        """End the threads, each after its present work; what waits fails."""
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)

    def matcher(self, constraint: Constraint) -> Matcher:
        """Return a new matcher; takes milliseconds to seconds. Raises as the future of `submit` does."""
        compiled = self._compiled(constraint)
        return Matcher(compiled.deep_copy(), self._vocabulary.vocab_size, constraint.param)

    def _post(self, work: Callable[[], R]) -> Future[R]:
        wanted: Future[R] = Future()

        def run() -> None:
            if not wanted.set_running_or_notify_cancel():
                return
            try:
                if self._closed:
                    raise EngineClosedError("the engine was closed while a grammar was compiled")
                wanted.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to who asked
                wanted.set_exception(error)

        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed: open a new one")
            if len(self._threads) < _NUM_THREADS:
                # Daemons, so that a compilation that never ends does not keep the process.
                thread = threading.Thread(
                    target=self._work, name="thermocline grammar", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        self._jobs.put(run)
        return wanted

    def _work(self) -> None:
        while (run := self._jobs.get()) is not None:
            run()

    def _compiled(self, constraint: Constraint) -> Any:  # noqa: ANN401 - llguidance's
        with self._lock:
            found = self._cached.get(constraint)
            if found is not None:
                self._cached.move_to_end(constraint)
                return found
        text = grammar_text(constraint)
        # Imported when it is first needed: it takes 8 MB, and most answers are free.
        import llguidance

        tokenizer = self._opened_tokenizer()
        limits = llguidance.LLParserLimits(
            max_items_in_row=_MAX_ROW_ITEMS,
            step_lexer_fuel=_STEP_FUEL,
            max_lexer_states=_MAX_LEXER_STATES,
            max_grammar_size=_MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )
        compiled = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if compiled.is_error():
            raise RequestError(
                f"{constraint.param} can not be enforced: {_reason(compiled.get_error())}",
                param=constraint.param,
            )
        # The first mask of a grammar takes milliseconds, and every copy shares what it found.
        bits = np.zeros(-(-self._vocabulary.vocab_size // 32), dtype=np.int32)
        compiled.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if compiled.is_stopped() and not compiled.is_accepting():
            raise RequestError(
                f"{constraint.param} can not be met by any answer", param=constraint.param
            )
        with self._lock:
            self._cached[constraint] = compiled
            while len(self._cached) > _MAX_CACHED:
                self._cached.popitem(last=False)
        return compiled

    def _opened_tokenizer(self) -> Any:  # noqa: ANN401 - llguidance's
        import llguidance

        with self._tokenizer_lock:
            if self._tokenizer is None:
                ends = sorted(self._vocabulary.end_ids)
                if not ends:
                    raise RequestError(
                        "this model has no end token: ask for an answer of free form"
                    )
                words = cast("llguidance.TokenizerWrapper", _Words(self._vocabulary, ends))
                self._tokenizer = llguidance.LLTokenizer(words, eos_token=ends)
            return self._tokenizer


class _Words:
    """A vocabulary as llguidance wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end_ids: Collection[int]) -> None:
        every = range(vocabulary.vocab_size)
        self._vocabulary = vocabulary
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in every]
        self.eos_token_id = min(end_ids)
        # An end token that is text besides would end the answer in the middle.
        self.special_token_ids = [i for i in every if i in end_ids or i in vocabulary.steering_ids]

    def __call__(self, text: str | bytes) -> list[int]:
        """Return how the model would write `text`, which the grammar forces."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._vocabulary.encode_more(text)


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _reason(message: str) -> str:
    """Return what the library says is wrong, in one line."""
    line = " ".join(message.split())
    return line[:_MAX_MESSAGE_CHARS] or "the library gives no reason"
