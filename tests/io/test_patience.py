"""How long ranks that read together wait for each other, and what they leave behind when they end."""

import os
import shutil

import pytest
from ranks_apart import run_apart


@pytest.mark.slow
@pytest.mark.parametrize("where", ["near", "far"])
def test_a_reader_waits_as_long_as_its_mesh(tmp_path, wb2, where):
    """Rank 1 opens the store and never reads: on one machine, and as on two."""
    code = f"""
import jigsaw.io
from jigsaw.io.reading import peers as _peers
if {where == "far"}:
    _peers.this_host = lambda: f"machine {{rank}}"
join()
mesh = jigsaw.init_mesh(device="cpu", lat=2, timeout=timedelta(seconds=6))
ds = jigsaw.io.open({wb2!r}, mesh=mesh, fields=["t2m"], mode="cooperative")
print("waits", ds._engine.peers.timeout)
if rank == 0:
    try:
        ds[0]
    except jigsaw.io.PeerError as e:
        print("told:", e)
    open(folder + "/told", "w")
while not os.path.exists(folder + "/told"):
    time.sleep(0.1)
os._exit(0)
"""
    told = run_apart(tmp_path, 2, code)[0][1]
    assert "waits 6.0" in told
    near = "told: waited 6 s for ranks [1] of the domain group to read their part"
    far = "s (of 6 that ranks wait for each other): "
    assert (near if where == "near" else far) in told, told


@pytest.mark.slow
def test_the_threads_of_a_readers_groups_end_before_python_does(tmp_path, wb2):
    """One that is left running may come back to a Python that has ended."""
    code = f"""
import atexit, contextlib
def names():
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # one that ended meanwhile
            found.append(open(f"/proc/self/task/{{thread}}/comm").read().strip())
    return sorted(name for name in found if "gloo" in name)
atexit.register(lambda: print("left", names() == before))
import jigsaw.io
from jigsaw.io.reading import peers as _peers
_peers.this_host = lambda: f"machine {{rank}}"
join()
mesh = jigsaw.init_mesh(device="cpu", lat=2)
before = None
while before != names():  # a thread has its name a moment after it began
    before = names()
    time.sleep(0.5)
ds = jigsaw.io.open({wb2!r}, mesh=mesh, fields=["t2m"], mode="cooperative")
for _ in jigsaw.io.DataLoader(ds, batch_size=5):
    pass
print("more", len(names()) > len(before))
leave()
"""
    for status, told in run_apart(tmp_path, 2, code):
        assert (status, told.split()) == (0, ["more", "True", "left", "True"]), told


_CAPABILITY = "=-all,+dac_read_search"  # to read Python's own files, wherever they lie; not what /proc asks for
_AS_A_USER = [
    *("setpriv", "--reuid", "100{rank}", "--regid", "100{rank}", "--clear-groups"),
    *(f"--{kind}{_CAPABILITY}" for kind in ("inh-caps", "ambient-caps", "bounding-set")),
]


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root starts processes of other users",
)
def test_ranks_of_four_users_read_and_end(tmp_path, wb2):
    """None may open the memory of another, so their boxes go over the network."""
    code = f"""
join()
import jigsaw.io
mesh = jigsaw.init_mesh(device="cpu", lat=2, lon=2)
ds = jigsaw.io.open({wb2!r}, mesh=mesh, fields=["t2m"], mode="cooperative")
total = sum(float(batch.input.sum()) for batch in jigsaw.io.DataLoader(ds, batch_size=2))
first = next(iter(jigsaw.io.DataLoader(ds)))
print(os.getuid(), ds[0].index, ds._engine.peers.is_spread, total)
leave()
"""
    # starting alone took four ranks 110 s on two cores that twenty others had too
    told = run_apart(tmp_path, 4, code, before=_AS_A_USER, seconds=400)
    assert [status for status, _ in told] == [0, 0, 0, 0], told
    assert [text.split()[:3] for _, text in told] == [[f"100{rank}", "0", "True"] for rank in range(4)]
    assert len({text.split()[3] for _, text in told}) == 1
