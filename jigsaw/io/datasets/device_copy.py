"""Copies from the reader's memory to the device that computes: none on a CPU, beside the computation on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DeviceCopier:
    """Copier of tensors to a device, for one reading thread.

    On CUDA, the thread that read them copies them from pinned memory on its own stream, and waits for the copy. So the
    memory can be used again at once, and the stream that computes never waits.
    """

    def __init__(self, device: str) -> None:
        # a thread's current GPU is its own: the one that the model computes on is that of the thread that makes this
        self._device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if device == "cuda" else None

    def bring(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy the tensors to the device, in the thread that read them."""
        if self._stream is None:
            return [x.to(self._device) for x in tensors]
        with torch.cuda.stream(self._stream):
            brought = [x.to(self._device, non_blocking=True) for x in tensors]
        self._stream.synchronize()
        return brought

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """Make them the computing thread's: their memory is not given to another copy while its stream uses it."""
        if self._stream is not None:
            for x in tensors:
                x.record_stream(torch.cuda.current_stream(self._device))
