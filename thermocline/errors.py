"""The exception tree: what went wrong, by what the caller can do about it.

    ThermoclineError
    |- ModelError              the model file can not be used: repair, replace or convert it
    |  |- ModelFileError       the bytes are not a valid GGUF (path, offset, fix)
    |  '- UnsupportedModelError  valid, but an architecture, tensor type or tokenizer we lack
    |- HubError                a model can not be had by its name: name, access, network or disk is in the way
    |  '- HubUnreachableError  the hub does not answer, or may not be asked: what is here can be used
    |- ConfigError             a setting is out of range or contradicts another: change it
    |- RequestError            this request can not be served as asked: change it (param names the field)
    |  |- PromptTooLongError   prompt and answer do not fit the context
    |  |- ChatTemplateError    the chat template refused or could not render these messages
    |  '- SavedPromptError     a saved prompt cache does not fit this model, or its file can not be used
    |- BusyError               no room for the request now: try again later
    |- ReaderTooSlowError      what reads an answer fell too far behind it: read faster
    |- NativeModuleError       the compiled core is missing or does not fit: build it
    |- DeviceMissingError      no GPU, or no packages that drive it: install them, or compute on the CPU
    '- EngineError             the engine can not go on
       |- EngineClosedError    it was closed, or is closing
       |- ModelChangedError    the model's file was truncated or overwritten: put a whole one there, open it again
       |- DeviceMemoryError    a device has no room for what a request needs; smaller ones may have
       |- MeshError            the ranks of one model can not work together: see what each one says
       |  |- GroupLostError    a rank was lost within a step: those that are left form a new group
       |  '- MeshEndedError    this rank can not go on: rank 0 has ended, or went on without it
       |- DeviceFaultError     a device computes wrongly, or not any more: restart, or compute on the CPU
       '- StageError           a stage failed (stage, layer, chunk, requests)

Every message says the fix. This file knows no other module.
"""

from __future__ import annotations


class ThermoclineError(Exception):
    """Base of everything that this package raises on purpose."""


class ModelError(ThermoclineError):
    """The model can not be used as it is."""


class ModelFileError(ModelError):
    """A GGUF file breaks its format.

    `path` names the file, `offset` the byte at which the fault was found (None where the fault has
    no single place), `fix` says what the user can do.
    """

    def __init__(self, path: str, what: str, *, offset: int | None = None, fix: str) -> None:
        self.path = path
        self.what = what
        self.offset = offset
        self.fix = fix
        where = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{path}{where}: {what}. Fix: {fix}")


class UnsupportedModelError(ModelError):
    """The file is valid, but needs something that this version does not have.

    `unsupported` lists each missing thing, so that one look shows everything that is in the way.
    """

    def __init__(self, path: str, what: str, *, unsupported: tuple[str, ...], fix: str) -> None:
        self.path = path
        self.what = what
        self.unsupported = unsupported
        self.fix = fix
        # What a file spells may be megabytes long.
        shown = (text if len(text) <= 160 else f"{text[:157]}..." for text in unsupported)
        super().__init__(f"{path}: {what}: {', '.join(shown)}. Fix: {fix}")


class HubError(ThermoclineError):
    """A model can not be had by its name, which `name` repeats; `fix` says what the user can do."""

    def __init__(self, name: str, what: str, *, fix: str) -> None:
        self.name = name
        self.what = what
        self.fix = fix
        super().__init__(f"{name}: {what}. Fix: {fix}")


class HubUnreachableError(HubError):
    """The hub does not answer, or may not be asked; a model that is on this machine can be used without it."""


class ConfigError(ThermoclineError, ValueError):
    """A setting is out of range or contradicts another; the message names it and the fix."""


class RequestError(ThermoclineError, ValueError):
    """A request can not be served as asked. `param` names the field at fault, None if no single one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class PromptTooLongError(RequestError):
    """Prompt plus requested answer exceed the context; or a text to embed does, which is `input`."""

    def __init__(
        self,
        num_prompt_tokens: int,
        max_context_tokens: int,
        *,
        param: str = "prompt",
        is_least: bool = False,
    ) -> None:
        """is_least: there may be more tokens, which were not counted."""
        self.num_prompt_tokens = num_prompt_tokens
        self.max_context_tokens = max_context_tokens
        left = " and at least one must be left for the answer" if param == "prompt" else ""
        super().__init__(
            f"the {param} has {'at least ' if is_least else ''}{num_prompt_tokens} tokens{left}, "
            f"but the context holds {max_context_tokens}: shorten the {param} or open the model with "
            "a larger context (--ctx)",
            param=param,
        )


class ChatTemplateError(RequestError):
    """The model's chat template refused these messages, broke its limits, or is not valid."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages")


class SavedPromptError(RequestError):
    """A prompt cache can not be saved to its file, or not be restored from it; the text says why."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="filename")


class BusyError(ThermoclineError):
    """All places are taken; nothing was lost, try again later."""


class ReaderTooSlowError(ThermoclineError):
    """What reads an answer fell further behind than it may; the answer was ended."""


class RemoteError(ThermoclineError):
    """Experts can not be computed by a worker."""


class WireError(RemoteError):
    """A peer's bytes break the protocol, or are of another version; the connection is over."""


class WorkerRefusedError(RemoteError):
    """Worker and parent do not fit: another model, a wrong secret, or limits that exclude each other."""


class WorkerLostError(RemoteError):
    """The connection to a worker, or its process, ended."""


class WorkerLateError(RemoteError):
    """A worker did not answer within the deadline."""


class WorkerSlowError(RemoteError):
    """A worker's answer is later than usual; the worker gets nothing more until it answers."""


class WorkerFailedError(RemoteError):
    """A worker could not compute one request; its connection goes on."""


class NativeModuleError(ThermoclineError, ImportError):
    """The compiled core is missing or of another version; the message names the build command."""


class DeviceMissingError(ThermoclineError):
    """There is no GPU, or the packages that drive it are missing; the message says what to install."""


class EngineError(ThermoclineError):
    """The engine can not go on."""


class EngineClosedError(EngineError):
    """The engine is closed or closing; open a new one."""


class ModelChangedError(EngineError):
    """A file of the model was truncated, overwritten or unreadable while it was used. It ends the engine.

    `path` names the file, `what` says what happened.
    """

    def __init__(self, path: str, what: str) -> None:
        self.path = path
        self.what = what
        super().__init__(
            f"{path} was changed while the model was open: {what}. What was computed since then is not given out. "
            "Fix: put the whole file there, by renaming it into place, and open the model again"
        )


class DeviceMemoryError(EngineError):
    """A device's memory is used up; `missing_bytes` more were needed than are free (None where unknown)."""

    def __init__(
        self,
        what: str,
        missing_bytes: int | None = None,
        *,
        fix: str = "give experts less of it (--expert-budget), or prompts smaller chunks (--prefill-chunk)",
    ) -> None:
        self.missing_bytes = missing_bytes
        missing = "" if missing_bytes is None else f": {missing_bytes} bytes are missing"
        super().__init__(f"the device has no room for {what}{missing}. Fix: {fix}")


class DeviceFaultError(EngineError):
    """A device computes something else than the CPU does, or does not work any more.

    The latter ends the engine.
    """


class MeshError(EngineError):
    """The ranks that run one model together can not do so; the message names the rank and the fix."""


class GroupLostError(MeshError):
    """A rank did not take part in a step: it was killed, stopped, or is late. What is left forms a new group."""


class MeshEndedError(MeshError):
    """This rank can not go on: rank 0 has ended, or the others went on without this rank."""


class StepLostError(EngineError):
    """A decode step that a device and the CPU share was given up; the next one is computed stage by stage."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"a decode step of the device and the CPU was lost: {why}; send the request again"
        )


class StageError(EngineError):
    """A pipeline stage failed; the original exception is the cause (`__cause__`)."""

    def __init__(
        self,
        stage: str,
        *,
        layer: int | None,
        chunk: int | None,
        requests: tuple[int, ...],
        why: str,
    ) -> None:
        self.stage = stage
        self.layer = layer
        self.chunk = chunk
        self.requests = requests
        place = "" if layer is None else f", layer {layer}"
        super().__init__(
            f"stage {stage!r} failed{place}, chunk {chunk}, requests {requests}: {why}"
        )
