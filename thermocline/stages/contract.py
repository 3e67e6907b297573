"""What the runner asks of a stage."""

from __future__ import annotations

from typing import Protocol, TypeAlias, TypeVar

from thermocline.messages import StageMessage

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)


class Stage(Protocol[In, Out]):
    """Takes one message, returns one message (None at the end of a side branch).

    A stage keeps no state per chunk: everything it needs is in the message.
    """

    async def __call__(self, message: In, /) -> Out:
        """Do the work for one message."""
        ...


AnyStage: TypeAlias = Stage[StageMessage, StageMessage | None]
