"""Finds out in a child process whether a grammar can be compiled within limits. Knows no request.

A compiled grammar can not be handed between processes. So it is compiled in the child first, which is killed when it
takes too long or too much memory, and here only when the child could.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from pathlib import Path
from queue import LifoQueue
from typing import TYPE_CHECKING, Any, Final

from thermocline.child.process import ChildError, ChildLimits, ChildProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PROGRAM: Final = Path(__file__).with_name("grammar_program.py")


class GrammarTrials:
    """Tries grammars, some at a time, each in a child of its own; children are started when they are first needed."""

    def __init__(
        self,
        vocabulary: Mapping[str, Any],
        num_children: int,
        limits: ChildLimits | None = None,
    ) -> None:
        """vocabulary: the program's request of that name, without "op"."""
        self._load = json.dumps({"op": "vocabulary", **vocabulary}).encode()
        self._idle: LifoQueue[ChildProcess] = LifoQueue()
        self._closed = threading.Event()
        for _ in range(num_children):
            self._idle.put(ChildProcess(_PROGRAM, limits or ChildLimits()))

    def refusal(self, grammar: str) -> str | None:
        """Return why the grammar can not be compiled; None if it can. Thread-safe."""
        request = json.dumps({"op": "compile", "grammar": grammar}).encode()
        with self._borrowed() as child:
            try:
                if child.pid is None:
                    child.exchange(self._load)
                answer = json.loads(child.exchange(request))
            except ChildError as error:
                return f"compiling it was stopped: {error}. Ask for a simpler form"
            if answer["ok"]:
                return None
            if answer["kind"] == "limit":
                child.stop()
                return f"compiling it was stopped: {answer['message']}. Ask for a simpler form"
            return str(answer["message"])

    def close(self) -> None:
        """End the children: those in use when their present grammar is done."""
        self._closed.set()
        while not self._idle.empty():
            self._idle.get().stop()

    @contextmanager
    def _borrowed(self) -> Iterator[ChildProcess]:
        child = self._idle.get()
        try:
            yield child
        finally:
            if self._closed.is_set():
                child.stop()
            self._idle.put(child)
