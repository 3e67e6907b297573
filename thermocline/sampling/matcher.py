"""Decides which tokens a constraint allows next, with llguidance. Knows no sampling and no request.

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
from thermocline.sampling.trial import GrammarTrials

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from thermocline.child.process import ChildLimits
    from thermocline.sampling.constraint import Constraint
    from thermocline.sampling.logits import Logits

R = TypeVar("R")

_MAX_CACHED: Final = 32
# Of the texts of cached grammars. One of 64 KiB takes 40 to 80 MB when it is compiled.
_MAX_CACHED_CHARS: Final = 1 << 17
_NUM_THREADS: Final = 2
DEEP_STACK_BYTES: Final = 64 << 20
"""Of a thread that compiles, only used where it is needed. The compiler calls itself for each level of a grammar; what a
child with a sixteenth of it has compiled can not overflow it."""
# `close` waits this long for a compilation.
_JOIN_S: Final = 1.0
_MAX_MESSAGE_CHARS: Final = 300

# Limits of one grammar: about 10 ms of lexer work per step, 20 MB of lexer states.
_LIMITS: Final[dict[str, Any]] = {
    "max_items_in_row": 10_000,
    "step_lexer_fuel": 150_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}

# Of a forced text, this is looked at: so many characters, or so many of the longest tokens.
_FORCED_CHARS: Final = 256
_FORCED_TOKENS: Final = 4

# For each byte of a bit mask, what is added to the logits of its 8 tokens, the lowest bit first.
_ALLOWED_BITS: Final = np.arange(256)[:, None] >> np.arange(8) & 1
_PENALTIES: Final = np.where(_ALLOWED_BITS, np.float32(0), np.float32(-np.inf)).astype(np.float32)


class GrammarTokenizer(Protocol):
    """What grammars need of a tokenizer."""

    vocab_size: int
    end_ids: frozenset[int]
    steering_ids: frozenset[int]
    """Tokens that steer the model. No grammar's text consists of them."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token."""
        ...

    def encode_more(self, text: str) -> list[int]:
        """Return the token ids of `text` that continues other text."""
        ...


class Matcher:
    """Follows one answer through its constraint.

    It caches its place after the tokens of the latest call. Any tokens may come next, but one more token is
    the cheap case. Not thread-safe.
    """

    def __init__(self, compiled: Any, vocab_size: int, param: str) -> None:  # noqa: ANN401 - llguidance's
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._param = param
        self._consumed: list[int] = []
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._row = np.empty((len(self._bits) * 4, 8), dtype=np.float32)
        self._scout: Matcher | None = None
        """Goes ahead for drafts. It fails alone where these make the grammar too complex."""

    def __repr__(self) -> str:
        return f"Matcher({len(self._consumed)} tokens)"

    def masked(self, logits: Logits, output_ids: Sequence[int]) -> Logits:
        """Return `logits` [V] with -inf for every token that must not follow `output_ids`.

        The caller may change the result, which is valid until the next call. Raises RequestError when the
        grammar becomes too complex, or allows only tokens that the model finds impossible.
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
        """Whether `output_ids` fulfil the constraint, and no token may follow them."""
        self._follow(output_ids)
        return bool(self._compiled.is_stopped())

    def num_possible(self, output_ids: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may follow `output_ids`, one after another. Changes nothing, and raises nothing."""
        if not tokens:
            return 0
        if self._scout is None:
            self._scout = Matcher(self._compiled.deep_copy(), self._vocab_size, self._param)
            self._scout._consumed = [*self._consumed]  # noqa: SLF001 - a copy of this one
        return self._scout._num_valid(output_ids, tokens)  # noqa: SLF001 - the same class

    def _num_valid(self, output_ids: Sequence[int], tokens: Sequence[int]) -> int:
        if self._compiled.is_error():
            return 0
        try:
            self._follow(output_ids)
        except RequestError:
            return 0
        count = int(self._compiled.validate_tokens(list(tokens)))
        return 0 if self._compiled.is_error() else count

    def _follow(self, output_ids: Sequence[int]) -> None:
        """Move the compiled grammar to the place after `output_ids`."""
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
    """Compiles constraints for one vocabulary, in threads of its own, and caches the latest ones."""

    def __init__(self, tokenizer: GrammarTokenizer, trials: GrammarTrials | None = None) -> None:
        """trials: where constraints of others are compiled first, in a child that is killed when it takes too long.

        They are closed with this object.
        """
        self._tokenizer = tokenizer
        self._trials = trials
        self._lock = threading.Lock()
        self._table_lock = threading.Lock()
        self._table: Any = None
        """llguidance's table of the vocabulary, made when it is first needed."""
        self._cached: OrderedDict[Constraint, Any] = OrderedDict()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, constraint: Constraint) -> Future[Matcher]:
        """Make a matcher in one of the threads. Raises EngineClosedError after `close`.

        The future raises RequestError for a constraint that is invalid or not supported.
        """
        return self._post(lambda: self.matcher(constraint))

    def prepare(self) -> Future[Any]:
        """Make the vocabulary's table in one of the threads, if the model can be constrained."""
        return self._post(lambda: self._open_table() if self._tokenizer.end_ids else None)

    def close(self) -> None:
        """End the threads, each after its present job. Jobs that wait fail."""
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        if self._trials is not None:
            self._trials.close()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def matcher(self, constraint: Constraint) -> Matcher:
        """Return a new matcher. Takes milliseconds to seconds. Raises as the future of `submit` does."""
        compiled = self._compiled(constraint)
        return Matcher(compiled.deep_copy(), self._tokenizer.vocab_size, constraint.param)

    def _post(self, work: Callable[[], R]) -> Future[R]:
        wanted: Future[R] = Future()

        def run() -> None:
            if not wanted.set_running_or_notify_cancel():
                return
            try:
                if self._closed:
                    raise EngineClosedError("the engine was closed while a grammar was compiled")
                wanted.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                wanted.set_exception(error)

        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed: open a new one")
            if len(self._threads) < _NUM_THREADS:
                # Daemons, so that an endless compilation does not keep the process alive.
                thread = threading.Thread(
                    target=self._work, name="thermocline grammar", daemon=True
                )
                start_deep(thread)
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
        if not self._tokenizer.end_ids:
            raise RequestError("this model has no end token: ask for an answer of free form")
        why = None if self._trials is None else self._trials.refusal(text)
        if why is not None:
            raise _not_enforced(constraint, why)
        # Imported when it is first needed: it takes 8 MB, and most answers have no constraint.
        import llguidance

        limits = llguidance.LLParserLimits(**_LIMITS)
        compiled = llguidance.LLMatcher(self._open_table(), text, log_level=0, limits=limits)
        if compiled.is_error():
            raise _not_enforced(constraint, compiled.get_error())
        # The first mask of a grammar takes milliseconds. Every copy shares its result.
        bits = np.zeros(-(-self._tokenizer.vocab_size // 32), dtype=np.int32)
        compiled.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if compiled.is_stopped() and not compiled.is_accepting():
            raise RequestError(
                f"{constraint.param} can not be met by any answer", param=constraint.param
            )
        with self._lock:
            self._cached[constraint] = compiled
            num_chars = sum(len(each.text) for each in self._cached)
            while len(self._cached) > _MAX_CACHED or (
                num_chars > _MAX_CACHED_CHARS and len(self._cached) > 1
            ):
                oldest, _ = self._cached.popitem(last=False)
                num_chars -= len(oldest.text)
        return compiled

    def _open_table(self) -> Any:  # noqa: ANN401 - llguidance's
        import llguidance

        with self._table_lock:
            if self._table is None:
                ends = sorted(self._tokenizer.end_ids)
                wrapper = cast("llguidance.TokenizerWrapper", _Wrapper(self._tokenizer, ends))
                self._table = llguidance.LLTokenizer(wrapper, eos_token=ends)
            return self._table


class _Wrapper:
    """A tokenizer with the interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: GrammarTokenizer, end_ids: Collection[int]) -> None:
        every = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in every]
        self.eos_token_id = min(end_ids)
        special = _special_ids(tokenizer)
        self.special_token_ids = [i for i in every if i in special]
        longest = max(map(len, self.tokens), default=0)
        self._max_forced_chars = max(_FORCED_CHARS, _FORCED_TOKENS * longest)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the model's tokens for the beginning of `text`, which the grammar forces.

        A mask allows the first of them alone, and the next mask asks again. All of a long text each time would take its
        length times the number of steps.
        """
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode_more(text[: self._max_forced_chars])


def start_deep(thread: threading.Thread) -> None:
    """Start a thread with a stack of DEEP_STACK_BYTES."""
    usual = threading.stack_size(DEEP_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(usual)


def open_trials(tokenizer: GrammarTokenizer, limits: ChildLimits | None = None) -> GrammarTrials:
    """Return trials of grammars for this vocabulary, as many at a time as are compiled."""
    special = {
        str(token_id): tokenizer.token_bytes(token_id).hex()
        for token_id in sorted(_special_ids(tokenizer))
    }
    vocabulary = {
        "size": tokenizer.vocab_size,
        "special": special,
        "ends": sorted(tokenizer.end_ids),
        "limits": _LIMITS,
    }
    return GrammarTrials(vocabulary, _NUM_THREADS, limits)


def _special_ids(tokenizer: GrammarTokenizer) -> frozenset[int]:
    """Return the tokens that are no text. An end token that counted as text would end the answer in the middle."""
    return frozenset(tokenizer.end_ids | tokenizer.steering_ids)


def _not_enforced(constraint: Constraint, why: str) -> RequestError:
    return RequestError(
        f"{constraint.param} can not be enforced: {_reason(why)}", param=constraint.param
    )


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _reason(message: str) -> str:
    """Return the library's error message in one line."""
    line = " ".join(message.split())
    return line[:_MAX_MESSAGE_CHARS] or "the library gives no reason"
