"""What the runner asks of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from thermocline.messages import StageMessage

if TYPE_CHECKING:
    from collections.abc import Coroutine

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)


class Stage(Protocol[In, Out]):
    """Takes one message, returns one message (None at the end of a side branch).

    A stage keeps no state per chunk: everything it needs is in the message.
    """

    def __call__(self, message: In, /) -> Coroutine[Any, Any, Out]:
        """Do the work for one message. Waits for nothing but lanes."""
        ...


AnyStage: TypeAlias = Stage[StageMessage, StageMessage | None]
