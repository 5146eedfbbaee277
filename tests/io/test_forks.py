"""What a process does that was forked from one that reads: it raises, at once, and its parent reads on."""

import pytest
import torch
from globe_store import stacked
from ranks_apart import run_apart
from volume_store import pairs

from jigsaw.io import DataLoader, ForkedError, ReadError, VolumeLoader, open_volumes
from jigsaw.io import open as open_dataset
from jigsaw.ranks.mesh import init_mesh

_FORK = """
import jigsaw.io

def forked(act, end=os._exit):
    "What a forked child is told, once it has ended."
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
            told = "nothing"
        except BaseException as e:
            told = f"{type(e).__name__}: {e}"
        os.write(w, told.encode())
        end(0)
    os.close(w)
    with os.fdopen(r) as pipe:
        print("child:", pipe.read())
    os.waitpid(pid, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forked_process_is_told_by_name(tmp_path, wb2, ranks):
    code = f"""{_FORK}
if size > 1:
    join()
mesh = jigsaw.init_mesh(device="cpu", lat=size)
ds = jigsaw.io.open({wb2!r}, mesh=mesh, fields=["t2m"])
whole = [float(ds[i].input.local.double().sum()) for i in range(3)]
loader = jigsaw.io.DataLoader(ds)
under_way = iter(loader)
next(under_way)
forked(lambda: ds[0])
forked(lambda: next(under_way))
forked(lambda: next(iter(loader)))
forked(lambda: (loader.close(), ds._engine.close()), sys.exit)
if size > 1:
    fresh = jigsaw.io.open({wb2!r}, mesh=mesh, fields=["t2m"])
    forked(lambda: fresh[0])
assert [float(ds[i].input.local.double().sum()) for i in range(3)] == whole
assert float(next(under_way).input.local.double().sum()) == whole[1]
print("read on")
"""
    for status, told in run_apart(tmp_path, ranks, code):
        assert status == 0, told
        lines = told.strip().split("\n")
        named = ["this reader", "this iteration", "this reader", None, "the mesh DeviceMesh"][: len(lines) - 1]
        assert len(named) == (4 if ranks == 1 else 5)
        for line, name in zip(lines, named, strict=False):
            assert line.startswith(f"child: ForkedError: {name}" if name else "child: nothing"), line
            assert name is None or 'multiprocessing_context="spawn"' in line
        assert lines[-1] == "read on"


def _values(sample):
    return sample.input.full_tensor()


def _image(sample):
    return sample.image.full_tensor()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_torchs_loader_of_forked_workers_raises_and_of_spawned_ones_reads(wb2):
    ds = open_dataset(wb2, mesh=init_mesh(device="cpu", lat=1), fields=["t2m"])
    first = _values(ds[0])
    forked = torch.utils.data.DataLoader(ds, num_workers=1, batch_size=None, collate_fn=_values)
    with pytest.raises(ForkedError, match=r'this reader belongs to process .* multiprocessing_context="spawn"'):
        next(iter(forked))
    spawned = torch.utils.data.DataLoader(
        ds, num_workers=1, batch_size=None, collate_fn=_values, multiprocessing_context="spawn"
    )
    torch.testing.assert_close(next(iter(spawned)), first, rtol=0, atol=0)
    torch.testing.assert_close(first[0, 0].double(), torch.from_numpy(stacked(wb2, ["2m_temperature"])[0, 0]))
    assert issubclass(ForkedError, ReadError)


@pytest.mark.timeout(120)
def test_volumes_of_a_forked_process_raise(tmp_path):
    images, labels, _ = pairs(tmp_path, [(12, 12, 12)])
    ds = open_volumes(images, labels, mesh=init_mesh(device="cpu", z=1), crop=(8, 8, 8))
    _image(ds[0])
    forked = torch.utils.data.DataLoader(ds, num_workers=1, batch_size=None, collate_fn=_image)
    with pytest.raises(ForkedError, match="this reader belongs to process"):
        next(iter(forked))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DataLoader, VolumeLoader])
def test_workers_are_refused_with_what_to_write_instead(kind):
    match = rf"num_workers=4 is an argument of torch's DataLoader; jigsaw.io.{kind.__name__} reads in threads.*threads="
    with pytest.raises(ReadError, match=match):
        kind(None, num_workers=4)
