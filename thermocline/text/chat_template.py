"""Chat messages to prompt text by the model's own Jinja template, run in a killable child.

Owns the child, the limits and the marks by which control tokens of the template are told from text of
the caller. It knows no token ids.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from thermocline.child.process import ChildError, ChildLimits, ChildProcess
from thermocline.errors import ChatTemplateError, RequestError
from thermocline.text.chat_messages import normalize_messages, other_forms
from thermocline.text.templates.template_gaps import TemplateGaps

if TYPE_CHECKING:
    from thermocline.text.tool_calls.tool_formats import ToolFormat

_PROGRAM = Path(__file__).parent / "templates" / "template_program.py"
_END_MARK = "\ue2ff"
_NONCE_CHARS = 12  # of 256 values each: 96 bits that no caller can guess

_OWN_NAMES = frozenset(("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"))

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
    ],
)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a rendered prompt: a control token that the template wrote, or plain text."""

    text: str
    is_control: bool


class _RefusedError(ChatTemplateError):
    """The template itself raised an error."""


class ChatTemplate:
    """One chat template, compiled in a child process with limits.

    `source` is Jinja as in `tokenizer.chat_template`; `bos_token` and `eos_token` are handed to it;
    `control_tokens` are the texts of the vocabulary's control tokens (`Tokenizer.control_texts`),
    needed for `render_parts`. tool_format: how the model writes calls; with it, tools and calls that the
    template leaves out are put into the prompt as text (`template_gaps`).

    Thread-safe: renders run one after the other. Close it after use; the child also ends when this
    object is collected or this process dies.

    Raises ChatTemplateError, naming the line, if the source is not valid, and if the template needs
    more than the limits allow.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        control_tokens: Iterable[str] = (),
        tool_format: ToolFormat | None = None,
        limits: ChildLimits | None = None,
    ) -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._control = sorted(control_tokens)
        self.control_tokens = frozenset(self._control)
        self._limits = limits or ChildLimits()
        self._lock = threading.Lock()
        self._process = ChildProcess(_PROGRAM, self._limits)
        self._closed = False
        self._nonce = _new_nonce()
        self._assembles = False
        render = partial(self._in_some_form, marked=False)
        self._gaps = (
            None if tool_format is None else TemplateGaps(tool_format, lambda one: render(one)[0])
        )
        try:
            with self._lock:
                self._load()
            if self._control:
                self._assembles = self._joins_or_cuts_control_tokens()
        except BaseException:
            self.close()
            raise

    @classmethod
    def chatml(
        cls, *, control_tokens: Iterable[str] = (), limits: ChildLimits | None = None
    ) -> Self:
        """The common `<|im_start|>role ... <|im_end|>` form, for files without a template.

        Fits vocabularies that have <|im_start|> and <|im_end|>.
        """
        return cls(_CHATML, control_tokens=control_tokens, limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"pid={self._process.pid}"
        return f"ChatTemplate({len(self._source)} characters, {state})"

    def close(self) -> None:
        """End the child. Rendering afterwards raises ChatTemplateError."""
        with self._lock:
            self._closed = True
            self._process.stop()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt as one text, for people: encoding it would take forged control tokens as real.

        `variables` are what the template takes besides (enable_thinking, ...); plain JSON values only.
        Raises RequestError for messages of a wrong shape, ChatTemplateError if the template refuses
        or breaks its limits.
        """
        context = _context(messages, tools, add_generation_prompt, variables)
        return self._accepted(context, marked=False)[0]

    def render_parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[PromptPart]:
        """The prompt in parts: what the template writes as control token, and plain text.

        The child marks the control tokens in the template's own text with a secret before it is
        compiled, so nothing in messages, tools or variables can become one, whatever the template
        does with it. Arguments and errors as in `render`; besides, ChatTemplateError for a template
        that joins or cuts control tokens, because those can not be told from forged ones.
        """
        if self._assembles:
            raise ChatTemplateError(
                "the chat template joins or cuts control tokens, so they can not be told from text of "
                "the caller: open the model with a template that writes them whole"
            )
        context = _context(messages, tools, add_generation_prompt, variables)
        return self._split(*self._accepted(context, marked=True))

    def _joins_or_cuts_control_tokens(self) -> bool:
        """Whether harmless conversations come out with other control tokens than were marked."""
        for probe in _PROBES:
            context = _context(probe, None, True, None)
            try:
                plain, _ = self._accepted(context, marked=False)
                parts = self._split(*self._accepted(context, marked=True))
            except ChatTemplateError:
                if self._process.pid is None:
                    raise
                continue
            if "".join(part.text for part in parts) != plain:
                return True
            free = [part.text for part in parts if not part.is_control]
            if any(token in text for token in self._control for text in free):
                return True
        return False

    def _accepted(self, context: dict[str, Any], *, marked: bool) -> tuple[str, tuple[str, ...]]:
        """The text with what the template leaves out of it, and the nonces of the marks in it."""
        own = (
            _new_nonce()
        )  # of marks in the messages, which no caller can know before they are written
        if self._gaps is not None:
            context = self._gaps.fill(context, partial(self._marked, own) if marked else str)
        text, nonce = self._in_some_form(context, marked=marked)
        return text, (nonce, own)

    def _marked(self, nonce: str, text: str) -> str:
        """The text with its control tokens marked."""
        if not self._control:
            return text
        tokens = sorted(self._control, key=len, reverse=True)
        return re.sub(
            "|".join(map(re.escape, tokens)),
            lambda found: f"{nonce}{self._control.index(found[0])}{_END_MARK}",
            text,
        )

    def _in_some_form(self, context: dict[str, Any], *, marked: bool) -> tuple[str, str]:
        """The text, of another form of the messages where the template refuses the usual one."""
        try:
            return self._render(context, marked=marked)
        except _RefusedError as error:
            for other in other_forms(context):
                with contextlib.suppress(_RefusedError):
                    return self._render(other, marked=marked)
            raise error from None

    def _render(self, context: dict[str, Any], *, marked: bool) -> tuple[str, str]:
        """The text, and the nonce of the marks in it."""
        try:
            body = json.dumps(context, ensure_ascii=False, allow_nan=False)
            request = f'{{"op": "render", "marked": {json.dumps(marked)}, "context": {body}}}'
            raw = request.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(
                f"messages, tools and template variables must be plain JSON values: {error}"
            ) from error
        if len(raw) > self._limits.max_request_bytes:
            raise ChatTemplateError(
                f"messages and tools have {len(raw)} bytes: send at most "
                f"{self._limits.max_request_bytes}"
            )
        with self._lock:
            if self._closed:
                raise ChatTemplateError("the chat template is closed: open the model again")
            if self._nonce in body:
                self._nonce = _new_nonce()
                self._process.stop()
            if self._process.pid is None:
                self._load()
            return self._exchange(raw), self._nonce

    def _load(self) -> None:
        request = {
            "op": "load",
            "source": self._source,
            "control": self._control,
            "nonce": self._nonce,
            **self._tokens,
        }
        self._exchange(json.dumps(request).encode())

    def _exchange(self, raw: bytes) -> str:
        """Ask the child; ends it when it broke a limit, so that the next call finds a fresh one."""
        try:
            answer = json.loads(self._process.exchange(raw))
        except (ChildError, ValueError) as error:
            self._process.stop()
            raise ChatTemplateError(f"the chat template was stopped: {error}") from error
        if answer["ok"]:
            return str(answer["text"])
        if answer["kind"] == "limit":
            self._process.stop()
            raise ChatTemplateError(f"the chat template was stopped: {answer['message']}")
        message = self._without_marks(answer["message"])
        if answer["kind"] == "syntax":
            raise ChatTemplateError(f"the model's chat template is not valid: {message}")
        raise _RefusedError(f"the chat template refused the messages: {message}")

    def _split(self, marked: str, nonces: tuple[str, ...]) -> list[PromptPart]:
        parts: list[PromptPart] = []
        pattern = _mark_pattern(f"(?:{'|'.join(nonces)})")
        for index, piece in enumerate(re.split(pattern, marked)):
            if index % 2:
                parts.append(PromptPart(self._control[int(piece)], is_control=True))
            elif piece:
                parts.append(PromptPart(piece, is_control=False))
        if any(nonce in part.text for nonce in nonces for part in parts):
            raise ChatTemplateError(
                "the chat template cuts its own control tokens apart: open the model with one that does not"
            )
        return parts

    def _without_marks(self, text: str) -> str:
        restored = re.sub(_mark_pattern(self._nonce), lambda m: self._control[int(m[1])], text)
        return restored.replace(self._nonce, "")


def _new_nonce() -> str:
    """Characters of the private use area, which no tokenizer or template has a meaning for."""
    return "".join(chr(0xE000 + value) for value in secrets.token_bytes(_NONCE_CHARS))


def _mark_pattern(nonce: str) -> str:
    return f"{nonce}([0-9]+){_END_MARK}"


def _context(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, object] | None,
) -> dict[str, Any]:
    taken = _OWN_NAMES.intersection(variables or ())
    if taken:
        raise RequestError(
            f"template variables may not be named {', '.join(sorted(taken))}: use the request's fields",
            param="chat_template_kwargs",
        )
    if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("each tool must be an object: check tools", param="tools")
    return {
        **(variables or {}),
        "messages": normalize_messages(messages),
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "add_generation_prompt": add_generation_prompt,
    }
