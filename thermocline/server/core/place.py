"""What a pool knows of one model: whether it is in memory, who uses it, and who waits for it. Only the pool changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from thermocline.engine.needs import ModelNeeds

if TYPE_CHECKING:
    from thermocline.server.core.backend import Backend, OpenModel
    from thermocline.server.core.catalogue import ModelSource
    from thermocline.server.core.lease import ModelLease

NO_NEEDS: Final = ModelNeeds(0)


@dataclass(slots=True, eq=False)
class Place:
    """One model, in memory or not. users: leases of its backend; waiting: those for the next one, in order."""

    model: ModelSource
    keep_alive_s: float
    backend: Backend | None = None
    needs: ModelNeeds | None = None
    """What it takes, once that was read for the present or next backend."""
    users: set[ModelLease] = field(default_factory=set)
    waiting: dict[ModelLease, None] = field(default_factory=dict)
    is_leaving: bool = False
    """Another model waits for its room: who comes now waits behind that."""
    last_used_s: float = 0.0

    @property
    def takes_requests(self) -> bool:
        """Whether a new lease may use the present backend. One that is there from the start is not opened again."""
        if self.backend is None or self.is_leaving:
            return False
        return self.model.is_pinned or not (self.backend.has_failed or self.backend.has_died)


@dataclass(frozen=True, slots=True)
class ModelState:
    """What a model is at one moment. expires_in_s: until it is unloaded if nobody asks; None while it is not loaded."""

    model: ModelSource
    state: str
    """unloaded, loading, loaded, failed or stopped."""
    opened: OpenModel | None
    host_bytes: int
    num_users: int
    expires_in_s: float | None


def grant_all(place: Place, backend: Backend) -> None:
    """Hand a model over to all who wait for it."""
    place.users.update(place.waiting)
    for lease in place.waiting:
        lease.grant(backend)
    place.waiting.clear()


def require_pinned(place: Place) -> None:
    """Raise what `Backend.model` raises for a model that is there from the start and can not answer."""
    if place.model.is_pinned and place.backend is not None:
        place.backend.model  # noqa: B018 - raises
