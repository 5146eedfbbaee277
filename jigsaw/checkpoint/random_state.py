"""State of the default random generators, as an object that a checkpoint holds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class RandomState:
    """State of torch's (of the CPU and the current GPU), numpy's and Python's generators, for ``jigsaw.save(path,
    random=RandomState(), ...)``.

    A checkpoint has those of the first rank, and loading sets every rank's to them, on any mesh.  Dropout and other
    random functions on tiles then continue as they would have. Their numbers come from the first rank's generator and
    the place in the whole tensor.  Separate generators that each rank seeds itself are not kept.

    >>> state = jigsaw.RandomState()
    >>> jigsaw.save("seeded", random=state)
    >>> drawn = torch.rand(2)
    >>> jigsaw.load("seeded", random=state)
    >>> torch.equal(torch.rand(2), drawn)
    True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators."""
        kind, words, *place = np.random.get_state()  # noqa: NPY002 # the default one is the one that users forget
        states: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": (kind, np.asarray(words).tolist(), *place),
        }
        return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from that state."""
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])  # noqa: NPY002
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])
