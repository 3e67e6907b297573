"""`ExpertBackend` of all ranks: this rank's tokens, computed where their experts are. Knows no stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Contributions
from thermocline.messages import BackendRole, LayerSum, PartialSum

if TYPE_CHECKING:
    from thermocline.messages import ExpertDispatch, ExpertResult, LayerWork
    from thermocline.parallel.rank import RankMember


class MeshExpertBackend:
    """Experts computed by the ranks that own them, this one among them."""

    def __init__(self, member: RankMember) -> None:
        self._member = member

    def __repr__(self) -> str:
        return f"MeshExpertBackend({self._member})"

    async def compute(self, work: LayerWork, dispatch: ExpertDispatch) -> ExpertResult:
        """See `ExpertBackend.compute`; the dispatch has all pairs of the layer. Raises MeshError."""
        found = await self._member.layer(work.layer, work, dispatch)
        role = BackendRole.REMOTE
        if isinstance(found, Contributions):
            return PartialSum(work.chunk, work.layer, role, found.rows, found.slots, found.values)
        return LayerSum(work.chunk, work.layer, role, found)
