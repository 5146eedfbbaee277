"""End of a job on request: Slurm and torchrun send a signal to some process at some time, and all ranks end at one
step.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm import collectives
from jigsaw.comm.agreement import first_rank_where
from jigsaw.ranks.mesh import axes_of_mesh, mesh_size
from jigsaw.ranks.model_world import job_size

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Request to end, by SIGTERM or SIGUSR1 on any rank of the mesh; meanwhile a signal itself ends nothing.

    Slurm sends SIGTERM ahead of SIGKILL, torchrun hands it on, and ``#SBATCH --signal=USR1@300`` sends SIGUSR1 five
    minutes before the time is up.  Each rank gets them at another line of its program, or only one rank does; the ranks
    agree in `heard`.  The end of the ``with`` block restores the old handlers.

    *Sends*: at each `heard`, one all-reduce of 4 bytes over the mesh, or of 8 over the job where devices are not CPUs.
    *Raises*: `ValueError` off the main thread, where Python takes no signals.

    >>> import signal
    >>> mesh = jigsaw.init_mesh(lat=1, device="cpu")
    >>> with jigsaw.StopRequest(mesh) as stop:
    ...     for step in range(100):
    ...         if step == 3:
    ...             signal.raise_signal(signal.SIGUSR1)
    ...         if stop.heard():  # on every rank, at the same step
    ...             break
    >>> step
    3
    """

    def __init__(self, mesh: DeviceMesh, signals: Sequence[signal.Signals] = _SIGNALS) -> None:
        self._mesh, self._is_asked = mesh, False
        self._before: dict[signal.Signals, Any] = {}
        for each in signals:
            self._before[each] = signal.signal(each, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def heard(self) -> bool:
        """Say whether any rank was asked, the same on all.

        Every rank calls this, once a step. Where the job's own group serves the host, no host waits for its device.
        """
        if self._mesh.device_type != "cpu" and mesh_size(self._mesh) == job_size():
            return first_rank_where(self._is_asked) is not None
        asked = torch.tensor([self._is_asked], dtype=torch.int32, device=self._mesh.device_type)
        names = [name for name, _ in axes_of_mesh(self._mesh)]
        return bool(collectives.all_reduce(asked, self._mesh, names, "max").item())

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)
