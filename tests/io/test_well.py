"""Files of The Well, read back bit for bit."""

import pickle

import h5py
import numpy as np
import pytest
import torch
from well_store import BOX, PLANE, RUNS, STEPS, STORAGE, make_fields, make_scalars, write_well

import jigsaw
from jigsaw.__main__ import main
from jigsaw.errors import GridError, UnsupportedStoreError
from jigsaw.testing import on_ranks, world_mesh

WINDOWS = STEPS - 2


def whole_channels(fields, run, step, space):
    """Return a step of a run as The Well's own reader flattens it, [C, *space]: what changes with time first."""
    moving, still = [], []
    for values, by_run, by_step, lacking in fields.values():
        values = values[run] if by_run else values
        values = values[step] if by_step else values
        if lacking is not None:
            values = values if values.ndim == len(space) else np.expand_dims(values, lacking)
            values = np.repeat(values, list(space.values())[lacking], lacking)
        (moving if by_step else still).append(np.moveaxis(values.reshape(*space.values(), -1), -1, 0))
    return np.concatenate([*moving, *still])


def check_samples(data, space, run_of=lambda run: (0, run)):
    """Compare samples of each run with the whole files, to the bit; `run_of` gives a run's file and its place there."""
    assert data.frame.dims == tuple(space)  # as they are stored
    for i in sorted({0, WINDOWS - 1, WINDOWS, len(data) // 2, len(data) - 1}):
        run, step = divmod(i, WINDOWS)
        first, place = run_of(run)
        fields = make_fields(space, first)
        whole = np.stack([whole_channels(fields, place, step + t, space) for t in (0, 1, 2)])
        sample = data[i]
        np.testing.assert_array_equal(sample.input.full_tensor(), whole[:2])
        np.testing.assert_array_equal(sample.target.full_tensor(), whole[2:, : len(data.target_fields)])


def open_windows(path, mesh, **more):
    return jigsaw.io.open(path, mesh=mesh, inputs=[-1, 0], targets=[1], **more)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder for each space, with a file for each storage, and two files of one series."""
    folder = tmp_path_factory.mktemp("well")
    for name, space in (("plane", PLANE), ("box", BOX)):
        (folder / name / "series").mkdir(parents=True)
        for storage in STORAGE:
            write_well(folder / name / f"{storage}.hdf5", space, storage)
        for first in (0, 1):
            write_well(folder / name / "series" / f"part_{first}.hdf5", space, "gzip", first, runs=RUNS)
    return str(folder)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("space", [PLANE, BOX], ids=["plane", "box"])
def test_a_bare_open_reads_all_fields(written, space, storage):
    path = f"{written}/{'plane' if space is PLANE else 'box'}/{storage}.hdf5"
    data = open_windows(path, world_mesh(**dict.fromkeys(space, 1)))
    assert len(data) == RUNS * WINDOWS
    check_samples(data, space)
    names = list(space)
    moving = [
        "density",
        "inflow",
        "outflow",
        *(f"velocity_{a}" for a in names),
        *(f"D_{a}{b}" for a in names for b in names),
    ]
    assert data.target_fields == tuple(moving)
    assert data.fields == (*moving, "depth", "speed")
    # a field that lacks a dim is read by the rows that it has; a chunk with some components of a tensor by libhdf5
    slow = {name for name in data.roles if data.store.arrays[name].decoder is None}
    assert slow == {"inflow", "outflow"} | ({"D"} if storage == "split" else set())


def check_on_mesh(folder, space, mesh):
    for storage in STORAGE:
        check_samples(open_windows(f"{folder}/{storage}.hdf5", mesh), space)
    data = open_windows(f"{folder}/series/*.hdf5", mesh)
    assert len(data) == 2 * RUNS * WINDOWS
    check_samples(data, space, lambda run: divmod(run, RUNS))
    again = pickle.loads(pickle.dumps(data))
    np.testing.assert_array_equal(again[7].input.full_tensor(), data[7].input.full_tensor())


@on_ranks(2)
def test_two_ranks_read_the_same(written):
    check_on_mesh(f"{written}/plane", PLANE, world_mesh(y=2))


@on_ranks(4)
def test_four_ranks_read_the_same(written):
    check_on_mesh(f"{written}/box", BOX, world_mesh(r=2, phi=2))


@on_ranks(4)
def test_each_chunk_is_decoded_once(written):
    """Of an epoch, each of the steps' chunks of three fields by one rank, on any mesh."""
    mesh = world_mesh(x=2, y=2)
    fields = ["density", "velocity", "D"]
    data = open_windows(f"{written}/plane/gzip.hdf5", mesh, fields=fields, mode="cooperative")
    assert data.plan([0, 1]).total.chunks == 3 * 4  # two windows of three steps share two of them
    loader = jigsaw.io.DataLoader(data, batch_size=len(data))
    batch = next(iter(loader))
    loader.close()
    assert batch.input.shape == (RUNS * WINDOWS, 2, 7, 7, 10)
    chunks = torch.tensor(loader.read_counts.chunks)
    torch.distributed.all_reduce(chunks)
    assert chunks.item() == 3 * RUNS * STEPS


def test_vectors_scalars_and_times_by_name(written):
    mesh = world_mesh(x=1)
    names = ["velocity_y", "D", "Re", "gain", "force", "time"]
    data = jigsaw.io.open(f"{written}/plane/series/*.hdf5", mesh=mesh, fields=names, targets=[1])
    assert data.fields == ("velocity_y", "D_xx", "D_xy", "D_yx", "D_yy", "Re", "gain", "force", "time")
    assert "Re" not in data.target_fields  # a static field: it is known
    sample = data[(RUNS + 1) * (STEPS - 1) + 2]  # step 2 of the second run of the second file
    fields, scalars = make_fields(PLANE, 1), make_scalars(1)
    values = sample.input.local[0].numpy()
    np.testing.assert_array_equal(values[0], fields["t1_fields", "velocity"].values[1, 2, ..., 1])
    numbers = [101.0, scalars["gain"].values[2], scalars["force"].values[1, 2], np.float32(1.1) * 2]
    np.testing.assert_array_equal(values[5:], np.broadcast_to(np.float32(numbers)[:, None, None], (4, 7, 10)))
    data = jigsaw.io.open(f"{written}/plane/chunks.hdf5", mesh=mesh, select={"trajectory": 1})
    assert len(data) == STEPS
    scaled = jigsaw.io.open(
        f"{written}/plane/chunks.hdf5", mesh=mesh, fields=["velocity"], normalize={"velocity": ([1.0, 2.0], [2.0, 4.0])}
    )
    expected = (make_fields(PLANE)["t1_fields", "velocity"].values[0, 0] - [1, 2]) / [2, 4]
    np.testing.assert_allclose(scaled[0].input.local[0], np.moveaxis(expected, -1, 0), rtol=1e-5, atol=1e-6)


MODES = {"periodic": "circular", "wall": "reflect", "open": "replicate"}


def padded(x, ends, width):
    """Pad [T, C, *space] by what lies beyond each end: the other rows, mirrored rows or the last row."""
    for d, (below, above) in enumerate(reversed(ends.values())):
        for kind, sides in [(below, (width, width))] if below == above else [(below, (width, 0)), (above, (0, width))]:
            pairs = [(0, 0)] * d + [sides] + [(0, 0)] * (len(ends) - d - 1)
            x = torch.nn.functional.pad(x, sum(pairs, ()), mode=MODES[kind])
    return x


@on_ranks(4)
def test_boundaries_are_told_to_readers_and_layers(written):
    mesh = world_mesh(x=2, y=2)
    data = jigsaw.io.open(f"{written}/plane/gzip.hdf5", mesh=mesh, fields=["density"], halo=2, boundary="store")
    assert data.boundary_types == {"x": ("periodic", "periodic"), "y": ("wall", "open")}
    whole = make_fields(PLANE)["t0_fields", "density"].values[0, :1, None]
    (a, b), (c, d) = data.layout.held(tuple(mesh.get_coordinate()))[-2:]
    assert (a, d - c) in ((-2, 7), (2, 7))  # of x the rows of the other end, of y no row beyond its ends
    sample = data[0]
    np.testing.assert_array_equal(sample.input.local, whole[..., c:d].take(range(a, b), axis=-2, mode="wrap"))
    wide = padded(sample.input, data.boundary_types, 1)
    assert torch.equal(wide.full_tensor(), padded(torch.from_numpy(whole), data.boundary_types, 1))


def test_a_boundary_that_the_store_does_not_say(wb2):
    with pytest.raises(GridError, match="boundary='store' takes what the store says"):
        jigsaw.io.open(wb2, mesh={"lat": 1}, boundary="store")
    with pytest.raises(GridError, match="boundary='periodic' must say it by dim"):
        jigsaw.io.open(wb2, mesh={"lat": 1}, boundary="periodic")


def test_files_that_cannot_be_one_series(tmp_path):
    mesh, first = {"x": 1}, write_well(tmp_path / "a.hdf5")
    longer = write_well(tmp_path / "b.hdf5", first=1, steps=STEPS + 1)
    with pytest.raises(GridError, match=r"another grid than .*a.hdf5: array 'density' is trajectory 3, time 6"):
        jigsaw.io.open([first, longer], mesh=mesh)
    walled = write_well(tmp_path / "c.hdf5", first=1, above="WALL")
    with pytest.raises(GridError, match=r"c.hdf5 has the boundaries \('wall', 'wall'\) along 'y'"):
        jigsaw.io.open([first, walled], mesh=mesh)


def test_a_file_that_does_not_hold_what_it_says(tmp_path):
    path = write_well(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as f:
        f["t0_fields/density"].attrs["time_varying"] = False
    with pytest.raises(GridError, match=r"'t0_fields/density' has the shape .*trajectory 3, x 7, y 10; correct"):
        jigsaw.io.open(path, mesh={"x": 1})
    path = write_well(tmp_path / "b.hdf5")
    with h5py.File(path, "a") as f:
        del f["t1_fields/velocity"]
    with pytest.raises(GridError, match="attributes name 't1_fields/velocity', which is not an array"):
        jigsaw.io.open(path, mesh={"x": 1})
    path = write_well(tmp_path / "c.hdf5")
    with h5py.File(path, "a") as f:
        f["t0_fields"].attrs["field_names"] = 3.0
    with pytest.raises(UnsupportedStoreError, match=r"is 3.0, and a list of names is expected"):
        jigsaw.io.open(path, mesh={"x": 1})


def test_statistics_and_pictures_of_a_file(written, tmp_path, capsys):
    path = f"{written}/plane/gzip.hdf5"
    assert main(["inspect", path]) == 0
    assert "velocity" in capsys.readouterr().out
    assert main(["plan", path, "--mesh", "x=2,y=2"]) == 0
    data = jigsaw.io.open(path, mesh=world_mesh(x=1), fields=["density", "velocity"])
    made = jigsaw.io.statistics(data)
    values = make_fields(PLANE)
    np.testing.assert_allclose(made["density"]["mean"], values["t0_fields", "density"].values.mean(), rtol=1e-5)
    deviation = values["t1_fields", "velocity"].values[..., 1].std()
    np.testing.assert_allclose(made["velocity_y"]["std"], deviation, rtol=1e-5)
