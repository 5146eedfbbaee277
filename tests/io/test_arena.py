"""The memory that ranks of a machine share: that it is the one that was meant, in which order words are stored in it,
and what many threads of a rank do with it at the same time.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch.distributed as dist
import xarray as xr
from globe_store import truth
from ranks_apart import run_apart
from toy_store import held, request, sample, write

from jigsaw.errors import PeerError
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading import arena as _arena
from jigsaw.io.reading.arena import Arena, arena_header_bytes, kernel_barrier, slot_ticket
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.peers import meet_peers
from jigsaw.io.reading.read_plan import plan_read
from jigsaw.testing import on_ranks, world_mesh

THREADS = 8
CHUNK = (1, 3, 13, 10)


@pytest.fixture
def other():
    """Another process, which ends with its input."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate()


@pytest.fixture
def arena(other):
    fd = os.memfd_create("jigsaw")
    os.truncate(fd, arena_header_bytes(2))
    made = Arena(fd, 0, [0, 1], [os.getpid(), other.pid], 60.0, lambda: None)
    yield made
    made.close()


def test_many_threads_look_around_at_the_same_time(arena, other):
    """The threads that read, decode and take wait independently; each looks for ranks that died."""

    def look(_thread):
        for _ in range(2000):
            arena._look_around(1, 1, float("inf"))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(look, range(THREADS)))


def test_every_thread_sees_that_a_rank_died(arena, other):
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(arena.wait, lambda: False, 1) for _ in range(THREADS)]
        other.communicate(b"\n")
        for each in waiting:
            with pytest.raises(PeerError, match=rf"rank 1 of the domain group \(process {other.pid}\) has ended"):
                each.result()


# -- the order of words ----------------------------------------------------------------------------------------------


def test_tickets_of_a_slot_only_grow():
    """Also from a read of very many sections to the next."""
    places = (0, 1, (1 << 20) - 1, 1 << 20, (1 << 31) - 1)
    tickets = [slot_ticket(read, place) for read in (1, 2, 3) for place in places]
    assert tickets == sorted(set(tickets)) and slot_ticket(2**31 - 1, 2**32 - 2) < 2**63


def test_every_word_is_stored_behind_a_barrier(arena):
    """What a word tells of lies in memory when the barrier runs, and the word itself does not yet."""
    seen = []
    arena._barrier = lambda: seen.append((arena._words.tolist(), bytes(arena._map[arena._messages :][:64])))

    def stored(act):
        """Which words were stored after each barrier of an act, and what message lay there by then."""
        before = arena._words.tolist()
        seen.clear()
        act()
        ends = [*(words for words, _ in seen[1:]), arena._words.tolist()]
        first = seen[0][0]
        data = [at for at, (a, b) in enumerate(zip(before, first, strict=True)) if a != b]
        words = [
            [at for at, (a, b) in enumerate(zip(words, end, strict=True)) if a != b]
            for (words, _), end in zip(seen, ends, strict=True)
        ]
        return data, words, seen[0][1]

    first_of_slot = arena._slot(1)
    digest, started = arena._of(0, _arena._DIGEST), arena._of(0, _arena._STARTED)
    assert stored(lambda: arena.start(1, 77, 100, 2))[:2] == ([digest], [[started]])
    assert stored(lambda: arena.publish(1, 5))[:2] == ([], [[first_of_slot]])
    assert stored(lambda: arena.release(1, 5))[:2] == ([], [[first_of_slot + 1]])
    length, failed = arena._of(0, _arena._LENGTH), arena._of(0, _arena._FAILED)
    data, words, message = stored(lambda: arena.fail(1, PeerError("why")))
    assert set(range(length, length + 1)) <= set(data)
    assert words == [[failed], [arena._of(2, 0)]]
    assert message.startswith(b"PeerError\nwhy")
    assert stored(lambda: arena.leave(1))[:2] == ([], [[arena._of(0, _arena._LEFT)]])


def check_read(engine, values):
    """A sample is read as numpy does."""
    asked = request({"lat": 2})
    got = engine.read(plan_read(asked, engine.store.arrays, "cooperative"))
    own = held(sample(values), asked.layout, list(asked.layout.coords())[engine.peers.me])
    np.testing.assert_array_equal(got, own.astype(asked.dtype))


@on_ranks(2)
def body_barrier(path, values, permitted):
    made, calls = _arena.memory_barrier, []
    barrier = kernel_barrier()
    _arena.memory_barrier = lambda: (lambda: (calls.append(1), barrier())) if permitted or dist.get_rank() else None
    try:
        engine = ReadEngine(open_store(path), world_mesh(lat=2))
        check_read(engine, values)
        assert engine.peers.is_spread != permitted
        assert bool(calls) == permitted
        engine.close()
    finally:
        _arena.memory_barrier = made


@pytest.mark.slow
@pytest.mark.skipif(kernel_barrier() is None, reason="this kernel has no membarrier(2), or does not permit it")
@pytest.mark.parametrize("permitted", [True, False])
def test_ranks_read_behind_the_kernels_barrier_and_without_one_over_the_network(tmp_path, permitted):
    """As processors that promise no order do; where one rank alone has no barrier, no rank shares memory."""
    body_barrier(*write(tmp_path, chunk=CHUNK), permitted)


# -- the memory that was meant ---------------------------------------------------------------------------------------

VICTIM = """
import os, sys
file = os.open(sys.argv[1], os.O_RDWR)
for fd in range(3, 400):
    if fd != file:
        os.dup2(file, fd)
print("open", flush=True)
input()
"""


@pytest.fixture
def victim(tmp_path):
    """A process that has a file open under every number, and the file."""
    file = tmp_path / "precious"
    file.write_bytes(b"p" * (1 << 21))
    process = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "open\n"
    yield process.pid, file
    process.communicate("\n")
    assert file.read_bytes() == b"p" * (1 << 21)


@on_ranks(2)
def body_elsewhere(path, values, pid):
    peers = meet_peers(world_mesh(lat=2))
    peers.pids = (pid, pid)
    engine = ReadEngine(open_store(path), peers)
    assert engine.arena is None
    assert engine.peers.is_spread
    check_read(engine, values)
    engine.close()


def test_a_number_that_leads_to_another_file_is_not_written_to(tmp_path, victim):
    """Another namespace of process ids lies behind /proc, or a copy of the machine: the boxes go over the network."""
    body_elsewhere(*write(tmp_path, chunk=CHUNK), victim[0])


def test_memory_of_the_same_numbers_and_another_mark_is_not_opened():
    """As on a machine that was copied while it ran, where devices and inodes are equal."""
    fd = _arena._create_memory_file(2)
    path, meant = f"/proc/self/fd/{fd}", _arena._MemoryMark.of(fd, 2)
    found = _arena._open_memory_file(path, meant, 2)
    assert os.fstat(found).st_ino == os.fstat(fd).st_ino
    os.close(found)
    for other in ({"mark": b"another!"}, {"inode": meant.inode + 1}, {"device": meant.device + 1}):
        assert _arena._open_memory_file(path, meant._replace(**other), 2) == -1
    read, end = os.pipe()  # which would wait for who writes, were it opened
    assert _arena._open_memory_file(f"/proc/self/fd/{read}", meant, 2) == -1
    for each in (fd, read, end):
        os.close(each)


IN_A_NAMESPACE = """
import subprocess
first = int(os.environ["FIRST"])
if size == 1:  # the first process of the namespace starts the ranks, under numbers that /proc has other processes for
    started = []
    for each in (0, 1):
        if first:
            with open("/proc/sys/kernel/ns_last_pid", "w") as f:
                f.write(str(first + each - 1))
        started.append(subprocess.Popen([sys.executable, "-W", "ignore", sys.argv[0], str(each), "2", folder]))
        assert not first or started[-1].pid == first + each
    sys.exit(max(each.wait() for each in started))
import jigsaw.io
join()
ds = jigsaw.io.open(os.environ["STORE"], mesh=jigsaw.init_mesh(device="cpu", lat=2), fields=["t2m"], mode="cooperative")
total = float(ds[0].input.sum())
if rank == 0:
    print("spread", ds._engine.peers.is_spread, "total", total, flush=True)
leave()
"""


def may_unshare():
    ran = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    return os.access("/proc/sys/kernel/ns_last_pid", os.W_OK) and ran.returncode == 0


@pytest.mark.skipif(sys.platform != "linux" or not may_unshare(), reason="namespaces of process ids are not permitted")
@pytest.mark.slow
@pytest.mark.parametrize("mounted", [True, False])
def test_ranks_in_a_namespace_of_process_ids(tmp_path, wb2, victim, mounted, monkeypatch):
    """They share memory where /proc shows their namespace; where it shows another one, they write to nobody's file."""
    pid, _ = victim
    monkeypatch.setenv("FIRST", "0" if mounted else str(pid))
    monkeypatch.setenv("STORE", wb2)
    starter = ["unshare", "--pid", "--fork", *(["--mount-proc"] if mounted else [])]
    ((status, told),) = run_apart(tmp_path, 1, IN_A_NAMESPACE, before=starter)
    assert status == 0, told
    assert f"spread {not mounted} total" in told, told


# -- where there is none of this -------------------------------------------------------------------------------------

AS_ON_MACOS = """
import builtins, errno, platform
for name in ("memfd_create", "MFD_CLOEXEC", "pidfd_open", "sched_getaffinity", "posix_fallocate"):
    delattr(os, name)
platform.system, platform.machine = lambda: "Darwin", lambda: "arm64"

def without_proc(call):
    def hidden(path, *args, **kwargs):
        if str(path).startswith(("/proc", "/dev/shm")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return call(path, *args, **kwargs)
    return hidden

builtins.open, os.open, os.stat, os.readlink = map(without_proc, (open, os.open, os.stat, os.readlink))
import jigsaw.io
join()
mesh = jigsaw.init_mesh(device="cpu", lat=2)
ds = jigsaw.io.open(os.environ["STORE"], mesh=mesh, fields=["t2m"], mode="cooperative", targets=[1])
total = 0.0
dims = ("time", "channel", "latitude", "longitude")
with jigsaw.io.Writer(f"{folder}/out.nc", dims=dims, like=ds, append_dim="time") as out:
    for batch in jigsaw.io.DataLoader(ds, batch_size=2):
        total += float(batch.input.double().sum())
        out.append(batch.target[:, 0], coords={"time": batch.target_times[:, 0]})
engine = ds.new_engine()
assert engine.arena is None and engine.peers.is_spread
assert engine.threads == max(1, min(8, os.cpu_count()))  # each rank takes its machine for its own
engine.close()
model = jigsaw.parallelize(torch.nn.Linear(16, 2), mesh)
jigsaw.save(f"{folder}/saved", model=model)
jigsaw.load(f"{folder}/saved", model=model)
jigsaw.save_weights(f"{folder}/model.safetensors", model)
jigsaw.load_weights(f"{folder}/model.safetensors", model)
print("total", total, flush=True)
leave()
"""


@pytest.mark.slow
def test_ranks_read_and_write_where_linux_calls_are_missing(tmp_path, wb2, monkeypatch):
    """No /proc, memfd, pidfd, affinity or preallocation, as on macOS: boxes go over the network, values stay."""
    monkeypatch.setenv("STORE", wb2)
    want = truth(wb2)["2m_temperature"].values.astype("f8")
    for status, told in run_apart(tmp_path, 2, AS_ON_MACOS):
        assert status == 0, told
        assert float(told.split("total")[1]) == pytest.approx(want[:-1].sum(), rel=1e-7)
    with xr.open_dataset(tmp_path / "out.nc") as written:
        np.testing.assert_allclose(written["2m_temperature"].values, want[1:], rtol=1e-6)
