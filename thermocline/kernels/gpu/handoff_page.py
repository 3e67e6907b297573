"""The device's side of a page that it shares with the CPU: its memory as tensors, and what is queued for each layer.

On CUDA the page is registered, so that kernels read and write it across the link. On torch's CPU device the core's
functions stand in, which wait without the interpreter's lock. Knows no expert and no model. See kernels/handoff.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import triton

from thermocline.kernels.gpu.gather_combine import naive_gather_combine
from thermocline.kernels.gpu.handoff_kernels import (
    flag_kernel,
    publish_kernel,
    shared_combine_kernel,
    wait_kernel,
)
from thermocline.kernels.handoff import PATIENCE_NS, HandoffEnd

if TYPE_CHECKING:
    from thermocline.kernels._native import HandoffPage
    from thermocline.kernels.gpu.layer import LayerOutput
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.handoff import PageShape
    from thermocline.messages import LayerIndex

_LINE_WORDS: Final = 16
_COLUMNS: Final = 1024  # of a program that combines
_COPIED: Final = 2048  # numbers of x that `publish_kernel` copies at once
_LOOK_NS: Final = 1000


class GivenUpError(Exception):
    """A step was given up while the device waited for the CPU. Never leaves the device's side."""


class DevicePage:
    """A page as a device sees it. One thread at a time, `computing`."""

    def __init__(
        self,
        streams: DeviceStreams,
        page: HandoffPage,
        shape: PageShape,
        *,
        patience_ns: tuple[int, int] = PATIENCE_NS,
        has_kernels: bool | None = None,
    ) -> None:
        """has_kernels: None for what the device has. Raises DeviceFaultError where the memory can not be registered."""
        device, self.page = streams.device, page
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        """Of the step that runs; 0 for one of nobody, which needs no CPU."""
        self._has_kernels = device.type == "cuda" if has_kernels is None else has_kernels
        self._patience_ns = patience_ns
        streams.share(self.page.memory)
        memory = torch.from_numpy(self.page.memory)
        layers, rows, chosen, hidden = shape

        def part(name: str, kind: torch.dtype, *shape: int) -> torch.Tensor:
            begin = self.page.layout[name]
            return memory[begin : begin + 4 * int(np.prod(shape))].view(kind).view(shape)

        names = ("abort", "busy", "begun", "ended")
        self._flags = {name: part(name, torch.int32, 1) for name in names}
        self._published = part("published", torch.int32, layers, _LINE_WORDS)
        self._served = part("served", torch.int32, layers, _LINE_WORDS)
        self._x = part("x", torch.float32, rows, hidden)
        self._cold = part("cold", torch.int32, rows, chosen)
        self._weights = part("weights", torch.float32, rows, chosen)
        self._place = part("place", torch.int32, rows, chosen)
        self._out = part("out", torch.float32, rows * chosen, hidden)
        self._ids_log = part("ids", torch.int32, layers, rows, chosen)
        self._weights_log = part("routing", torch.float32, layers, rows, chosen)
        # Apart from each other, so that kernels are not compiled for several alignments.
        self._num_cold = torch.zeros((layers, 4), dtype=torch.int32, device=device)

    def begin(self) -> None:
        """Queue: say that the step is computed now."""
        if self._has_kernels:
            self._set_flag("begun")
        elif epoch := self._epoch_here():
            self.page.begin(epoch)

    def end(self) -> None:
        """Queue: say that the step is done, unless it was given up."""
        if self._has_kernels:
            self._set_flag("ended")
        elif epoch := self._epoch_here():
            self.page.end(epoch)

    def publish(
        self, layer: LayerIndex, given: LayerOutput, slots: torch.Tensor, num_live: torch.Tensor
    ) -> None:
        """Queue: hand the layer's pairs without a slot to the CPU.

        slots: int32 [E], below zero for those. num_live: int64 [1], the first rows, which are tokens.
        """
        assert given.ids is not None, "a layer that is published has routed experts"
        assert given.weights is not None, "a layer that is published has routed experts"
        if self._has_kernels:
            num_rows, chosen = self._cold.shape
            publish_kernel[(1,)](
                *(self._published[layer], self._cold, self._weights, self._x),
                *(self._ids_log[layer], self._weights_log[layer], self._num_cold[layer]),
                *(given.x, given.ids.contiguous(), given.weights.contiguous(), slots),
                *(num_live, self.epoch),
                hidden=given.x.shape[1],
                num_chosen=chosen,
                block_pairs=triton.next_power_of_2(num_rows * chosen),
                block=_COPIED,
                interprets=triton.knobs.runtime.interpret,
                num_warps=8,
            )
        elif epoch := self._epoch_here():
            rows = slice(int(num_live))
            ids, weights = given.ids[rows], given.weights[rows].contiguous()
            x = given.x[rows].contiguous()
            arrays = (x.numpy(), ids.int().numpy(), weights.numpy(), slots[ids].numpy())
            self._num_cold[layer, 0] = self.page.publish(layer, epoch, *arrays)

    def wait(self, layer: LayerIndex) -> None:
        """Queue: wait until the CPU has served the layer, or the step is given up."""
        if self._has_kernels:
            idle_looks, busy_looks = (ns // _LOOK_NS for ns in self._patience_ns)
            wait_kernel[(1,)](
                *(self._served[layer], self._flags["abort"], self._flags["busy"]),
                *(self._num_cold[layer], self.epoch, idle_looks, busy_looks),
                interprets=triton.knobs.runtime.interpret,
                num_warps=1,
            )
        elif epoch := self._epoch_here():
            end = HandoffEnd(self.page.wait(layer, epoch, self._patience_ns))
            if end is not HandoffEnd.DONE:
                raise GivenUpError(end.name)

    def combine(
        self,
        layer: LayerIndex,
        outputs: torch.Tensor,
        pair_of: torch.Tensor,
        residual: torch.Tensor,
        num_live: torch.Tensor,
    ) -> torch.Tensor:
        """Return `gather_combine` of the device's pairs and the CPU's, in slot order; queues only.

        pair_of: int32 [T, slots], the row of `outputs`, or -1 for pairs of the CPU and of padding.
        """
        num_cold = self._num_cold[layer]
        if not self._has_kernels:
            return self._naive_combine(outputs, pair_of, residual, num_live * (num_cold[0] > 0))
        num_tokens, hidden = residual.shape
        out = torch.empty_like(residual)
        shared_combine_kernel[(num_tokens, triton.cdiv(hidden, _COLUMNS))](
            *(out, outputs, pair_of, residual, self._out, self._place, num_live, num_cold),
            hidden=hidden,
            num_slots=pair_of.shape[1],
            block=_COLUMNS,
        )
        return out

    def _naive_combine(
        self,
        outputs: torch.Tensor,
        pair_of: torch.Tensor,
        residual: torch.Tensor,
        num_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Twin of `shared_combine_kernel`. num_rows: the first rows, of which the CPU has pairs."""
        count = min(len(pair_of), len(self._place))
        is_cold = (pair_of[:count] < 0) & (torch.arange(count)[:, None] < num_rows)
        places = pair_of.clone()
        places[:count][is_cold] = len(outputs) + self._place[:count][is_cold]
        return naive_gather_combine(torch.cat((outputs, self._out)), places, residual)

    def _set_flag(self, name: str) -> None:
        flag_kernel[(1,)](
            *(self._flags[name], self._flags["abort"], self.epoch),
            interprets=triton.knobs.runtime.interpret,
            num_warps=1,
        )

    def _epoch_here(self) -> int:
        """Return the epoch where the device's memory is the host's."""
        return int(self.epoch) % (1 << 32)
