"""One real CT and its organs (`data/README.md`), cut along the spine: a half to train on, and a half held out."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import nibabel
import torch.distributed as dist

HERE = Path(__file__).parent / "data"
SCAN, LABELS = HERE / "ct.nii.gz", HERE / "labels.nii.gz"

# Organs that both halves have, by the numbers of TotalSegmentator's classes; all others are background.
ORGANS = {
    "lung": range(10, 15),
    "kidney": (2, 3),
    "bone": (*range(25, 51), *range(69, 79), *range(91, 117)),  # spine, limbs and hips, skull, ribs, sternum
    "muscle": range(80, 90),  # gluteal, back and hip muscles
}
CLASSES = ("background", *ORGANS)
LABEL_MAP = dict.fromkeys(range(1, 118), 0) | {n: k for k, of in enumerate(ORGANS.values(), 1) for n in of}


class Half(NamedTuple):
    """The paths of a half's image and label map."""

    scan: str
    labels: str


def halves(folder: Path) -> dict[str, Half]:
    """The right and the left half, which the first rank writes.

    Their files are not compressed, so a rank reads the rows of its tile and no others.
    """
    paths = {side: Half(*(str(folder / f"{side}-{what}.nii") for what in Half._fields)) for side in ("right", "left")}
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for whole, what in zip((SCAN, LABELS), Half._fields, strict=True):
            image = nibabel.as_closest_canonical(nibabel.load(whole))  # x runs from left to right of the patient
            middle = image.shape[0] // 2
            for side, rows in (("left", slice(0, middle)), ("right", slice(middle, None))):
                nibabel.save(image.slicer[rows], getattr(paths[side], what))  # its affine says where the half lies
    dist.barrier()
    return paths
