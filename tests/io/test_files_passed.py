"""Files of the package through which a sample goes: whoever reads how it is done reads these."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import jigsaw
from jigsaw.testing import on_ranks, world_mesh

ROOT = str(Path(jigsaw.__file__).parent)


class _FilesCalled:
    """Files of jigsaw whose functions are called, on any thread."""

    def __init__(self):
        self.names = set()

    def __call__(self, frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.names.add(frame.f_code.co_filename.removeprefix(ROOT + "/"))

    def taken(self):
        names, self.names = self.names, set()
        return names


@on_ranks(2)
def test_a_sample_passes_few_files(wb2):
    files = _FilesCalled()
    _ = jigsaw.io.open, jigsaw.io.DataLoader  # imports are not part of it
    threading.setprofile(files)
    sys.setprofile(files)
    try:
        dataset = jigsaw.io.open(str(wb2), mesh=world_mesh(lat=2), inputs=[0], targets=[1])
        loader = jigsaw.io.DataLoader(dataset, batch_size=1)
        batches = iter(loader)
        next(batches)
        first = files.taken()
        for _ in range(3):
            next(batches)
        later = files.taken()
        loader.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert "io/reading/read_plan.py" in first & later
    assert len(later) <= 40, sorted(later)
    assert len(first - {"testing/rank.py"}) <= 60, sorted(first)
