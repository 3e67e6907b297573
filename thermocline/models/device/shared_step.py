"""Decode steps through all layers on a device that has the non-expert weights and some experts.

The CPU computes the other experts meanwhile (kernels/handoff.py). Owns what the device sees of the page. Knows no store.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.gpu.handoff_page import DevicePage, GivenUpError
from thermocline.kernels.gpu.shared_experts import SharedExperts
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from thermocline.kernels._native import HandoffPage
    from thermocline.kernels.gpu.resident import ResidentExperts
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.handoff import Handoff
    from thermocline.messages import Chunk, FloatArray
    from thermocline.models.contract import SharedStep
    from thermocline.models.device.non_expert import DeviceNonExpert
    from thermocline.traces.recorder import Recorder
    from thermocline.workers.lane import LaneThread


class DeviceSharedStep:
    """Computes decode steps on the device's lane. See `StepDevice`."""

    takes_branches = True

    def __init__(
        self,
        non_expert: DeviceNonExpert,
        resident: ResidentExperts,
        streams: DeviceStreams,
        lane: LaneThread,
        recorder: Recorder,
    ) -> None:
        self._non_expert = non_expert
        self._resident = resident
        self._streams = streams
        self._lane = lane
        self._recorder = recorder
        self._experts: SharedExperts | None = None
        self._done: Future[FloatArray | None] = Future()

    def __repr__(self) -> str:
        return f"DeviceSharedStep({self._non_expert})"

    def launch(self, handoff: Handoff, step: SharedStep) -> None:
        """See `StepDevice.launch`."""
        self._done = Future()
        # The page of now: when the step begins, the CPU may have given it up and have another one.
        job = partial(self._run, handoff, handoff.page, step, self._done)
        self._lane.start(job, step.chunk)

    def prepare(self, handoff: Handoff, step: SharedStep) -> None:
        """Compute a step as one of nobody, so that what it needs is compiled: the CPU waits for that less long.

        Nothing is published. Raises as `finish`.
        """
        self.launch(handoff, replace(step, epoch=0))
        self.finish(len(step.x))

    def finish(self, num_rows: int, *, lost: bool = False) -> FloatArray:
        """See `StepDevice.finish`."""
        found = self._done.result()
        if found is None:  # given up: the CPU's side says so
            return np.zeros((num_rows, self._non_expert.spec.hidden_size), np.float32)
        return found

    def _run(
        self,
        handoff: Handoff,
        page: HandoffPage,
        step: SharedStep,
        done: Future[FloatArray | None],
    ) -> None:
        start_ns = self._recorder.now_ns()
        try:
            experts = self._experts_beside(handoff, page).at(step.residency, step.epoch)
            found = self._non_expert.shared_layers(step.chunk, step.x, experts)
        except GivenUpError:
            done.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised by `finish`
            if step.epoch:
                page.abort(step.epoch)
            done.set_exception(error)
        else:
            done.set_result(found)
            step.on_done()
        if self._recorder.enabled:
            self._show(step.chunk, start_ns)

    def _experts_beside(self, handoff: Handoff, page: HandoffPage) -> SharedExperts:
        if self._experts is None or self._experts.page.page is not page:
            with self._streams.computing():
                seen = DevicePage(self._streams, page, handoff.shape)
            self._experts = SharedExperts(self._resident, seen)
        return self._experts

    def _show(self, chunk: Chunk, start_ns: int) -> None:
        """Record when the device had the step; what its nodes did it does not say."""
        recorder, args = self._recorder, {"chunk": chunk.id, "tokens": chunk.num_tokens}
        recorder.span(self._lane.lane, Name.LAYER, start_ns, recorder.now_ns(), args)
        recorder.flow(chunk.id, self._lane.lane, start_ns, "step")
