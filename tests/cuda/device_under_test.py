"""The device that these tests run on: a GPU, or where there is none one that is played.  JIGSAW_TEST_DEVICE chooses."""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager
from functools import cache

import torch

import jigsaw
from jigsaw import testing
from jigsaw.testing.played_device import PLAYED_DEVICE, refuse_host_waits, why_not_played

IS_PLAYED = not torch.cuda.is_available() and not why_not_played()
DEVICE = os.environ.get("JIGSAW_TEST_DEVICE", PLAYED_DEVICE if IS_PLAYED else "cuda")


@cache
def device_mesh(**axes):
    """The mesh of a body: several ranks share a GPU where there are fewer, over gloo."""
    return jigsaw.init_mesh(device=DEVICE, **axes)


@cache
def has_nccl_for(ranks):
    """Say whether so many ranks can talk by NCCL here: each has a GPU, or NCCL lets them share one (2.30 and newer)."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return False
    version = ctypes.c_int()  # of the library that is loaded, which may be newer than torch's
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return torch.cuda.device_count() >= ranks or version.value >= 23000


def on_ranks(ranks, **options):
    """`jigsaw.testing.on_ranks` where ranks see the GPUs."""
    return testing.on_ranks(ranks, device=DEVICE, **options)


@contextmanager
def refused_waits():
    """Raise within the block where the host waits for the device."""
    if DEVICE == PLAYED_DEVICE:
        with refuse_host_waits():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def settle():
    """Wait for the GPU, so that what it finds wrong is told here."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
