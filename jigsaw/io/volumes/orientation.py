"""Orientation of a scan's axes in the world, and their turning: in nibabel's terms, and with its results."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError

_VOXEL_AXES = "xyz"
_WORLD_ENDS = ("LR", "PA", "IS")
"""Names of the low and the high end of each axis of the world."""


def orientation_codes(affine: NDArray[np.float64]) -> str:
    """Return the world ends that x, y and z run towards, as ``"RAS"`` or ``"LPS"``: nibabel's ``aff2axcodes``."""
    return "".join(_WORLD_ENDS[axis][sign > 0] for axis, sign in _world_axes(affine))


def _world_axes(affine: NDArray[np.float64]) -> tuple[tuple[int, int], ...]:
    """Return for x, y and z the world axis that each runs along most, and its sign: nibabel's ``io_orientation``."""
    columns = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    u, _, v = np.linalg.svd(columns)
    turned = u @ v  # the closest rotation: shears are out
    found = dict[int, tuple[int, int]]()
    # the surest first, so that an axis that lies between two takes what the others leave
    for voxel in np.argsort(np.min(-(turned**2), axis=0), kind="stable").tolist():
        world = int(np.argmax(np.abs(turned[:, voxel])))
        found[voxel] = world, 1 if turned[world, voxel] > 0 else -1
        turned[world] = 0
    return tuple(found[voxel] for voxel in range(3))


@dataclass(frozen=True)
class AxisTurn:
    """Turn of the stored x, y and z: the axis that each becomes, and whether it then runs the other way."""

    to: tuple[int, ...]
    flipped: tuple[bool, ...]

    @classmethod
    def of(cls, affine: NDArray[np.float64], codes: str) -> AxisTurn:
        """Return the turn that makes axes placed by `affine` run towards the ends that `codes` name."""
        asked = [next(w for w, ends in enumerate(_WORLD_ENDS) if code in ends) for code in codes]
        have = _world_axes(affine)
        to = tuple(asked.index(world) for world, _ in have)
        signs = [1 if code == _WORLD_ENDS[world][1] else -1 for code, world in zip(codes, asked, strict=True)]
        return cls(to, tuple(sign != signs[axis] for axis, (_, sign) in zip(to, have, strict=True)))

    def role(self, role: str) -> str:
        """Return the role that a stored dim of this role gets; any but x, y, z keeps its own."""
        return _VOXEL_AXES[self.to[_VOXEL_AXES.index(role)]] if role and role in _VOXEL_AXES else role

    def flips(self, role: str) -> bool:
        """Say whether the stored dim of this role is read backwards."""
        return bool(role) and role in _VOXEL_AXES and self.flipped[_VOXEL_AXES.index(role)]

    def check_dims(self, url: str, roles: tuple[str, ...]) -> None:
        """Raise `GridError` for a plane whose dims would no longer be y and x."""
        space = {role for role in roles if role and role in _VOXEL_AXES}
        if {self.role(role) for role in space} != space:
            raise GridError(
                f"{url} is a plane of {', '.join(sorted(space))}, and orientation= would make another dim of one; give "
                "the orientation that it has, leave orientation= out, or store it as a volume"
            )

    def turned_affine(self, affine: NDArray[np.float64], sizes: dict[str, int]) -> NDArray[np.float64]:
        """Return the affine of the turned voxels of a volume that is stored with these sizes."""
        back = np.zeros((4, 4))
        back[3, 3] = 1
        for stored, (to, flipped) in enumerate(zip(self.to, self.flipped, strict=True)):
            back[stored, to] = -1 if flipped else 1
            back[stored, 3] = sizes.get(_VOXEL_AXES[stored], 1) - 1 if flipped else 0
        return affine @ back


def checked_orientation(orientation: Any) -> str | None:
    """Check an orientation and return it in capitals. Raises: `FieldError` for anything else."""
    if orientation is None:
        return None
    codes = orientation.upper() if isinstance(orientation, str) else ""
    if (
        sorted(w for code in codes for w, ends in enumerate(_WORLD_ENDS) if code in ends) != [0, 1, 2]
        or len(codes) != 3
    ):
        raise FieldError(
            f"orientation={orientation!r} must say towards which end x, y and z run, by one letter each of L or R, "
            "P or A, I or S, like 'RAS'"
        )
    return codes


def differing_orientations(named: list[tuple[str, str]]) -> str:
    """Describe the first two of (name, orientation) that differ; empty where all are alike."""
    for (one, mine), (other, theirs) in pairwise(named):
        if mine != theirs:
            return f"{one} is stored {mine} and {other} {theirs}"
    return ""
