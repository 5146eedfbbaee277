"""Where a Zarr store may lead: links out of its folder and references to other places are refused on every way in."""

import base64
import json
import os
import pickle

import fsspec
import icechunk
import numpy as np
import pytest
import xarray as xr
import zarr
from fsspec.implementations.reference import LazyReferenceMapper
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.storage import FsspecStore, LocalStore

import jigsaw
from jigsaw.__main__ import main
from jigsaw.errors import CorruptChunkError, ReadError, UnsupportedStoreError
from jigsaw.io.chunks.files import StoreBounds
from jigsaw.io.formats.store import open_store
from jigsaw.testing import on_ranks, world_mesh

SHAPE = (4, 6, 5)


def write(path, level=1.0, zarr_format=3, **encoding):
    """A store of `level`, a chunk a step."""
    values = np.full(SHAPE, level, "f4")
    coords = {"time": np.arange(4), "lat": np.linspace(2, -2, 6), "lon": np.arange(5.0)}
    data = xr.Dataset({"t2m": (("time", "lat", "lon"), values)}, coords)
    more = {"t2m": {"chunks": (1, 6, 5), **encoding}}
    data.to_zarr(path, zarr_format=zarr_format, consolidated=False, encoding=more)
    return path


def link_chunk(own, theirs):
    chunk = "t2m/c/1/0/0" if (own / "zarr.json").exists() else "t2m/1.0.0"
    (own / chunk).unlink()
    (own / chunk).symlink_to(theirs / chunk)


def link_folder_of_chunks(own, theirs):
    moved = own / "t2m" / "c"
    if moved.exists():
        moved.rename(own.parent / "moved")
        moved.symlink_to(theirs / "t2m" / "c")
    else:  # of Zarr v2
        link_array(own, theirs)


def link_array(own, theirs):
    (own / "t2m").rename(own.parent / "moved")
    (own / "t2m").symlink_to(theirs / "t2m")


def link_coordinate(own, theirs):
    (own / "lat").rename(own.parent / "moved")
    (own / "lat").symlink_to(theirs / "lat")


def link_metadata(own, theirs):
    name = "zarr.json" if (own / "zarr.json").exists() else ".zarray"
    (own / "t2m" / name).unlink()
    (own / "t2m" / name).symlink_to(theirs / "t2m" / name)


LINKS = [link_chunk, link_folder_of_chunks, link_array, link_coordinate, link_metadata]


def read(given, **how):
    ds = jigsaw.io.open(given, mesh=world_mesh(lat=1), fields=["t2m"], **how)
    return np.stack([ds[i].input.local.numpy() for i in range(len(ds))])


@pytest.mark.parametrize(
    "given",
    [
        str,
        pytest.param(LocalStore, marks=pytest.mark.slow),
        lambda p: zarr.open_group(p, mode="r"),
        pytest.param(lambda p: f"file://{p}", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("form", [2, 3])
@pytest.mark.parametrize("link", LINKS)
def test_a_link_out_of_the_store_is_refused(tmp_path, link, form, given):
    own, theirs = write(tmp_path / "own.zarr", 1.0, form), write(tmp_path / "theirs.zarr", 666.0, form)
    link(own, theirs)
    with pytest.raises(UnsupportedStoreError, match=r"leads to .*theirs\.zarr.*outside of the store .*'outside'"):
        read(given(own))
    allowed = read(given(own), options={"outside": [str(theirs)]})
    assert (allowed == 666.0).any() or link in (link_coordinate, link_metadata)
    np.testing.assert_array_equal(read(given(own), options={"outside": True}), allowed)


@pytest.mark.parametrize("shards", [None, (2, 6, 5)])
def test_a_shard_and_an_odd_codec_are_refused_too(tmp_path, shards):
    more = {"shards": shards} if shards else {"filters": [zarr.codecs.numcodecs.Delta(dtype="<f4")]}
    own, theirs = write(tmp_path / "own.zarr", **more), write(tmp_path / "theirs.zarr", 666.0, **more)
    link_chunk(own, theirs) if not shards else link_folder_of_chunks(own, theirs)
    with pytest.raises(UnsupportedStoreError, match="outside of the store"):
        read(str(own))


def test_links_within_the_store_and_to_the_store_are_followed(tmp_path):
    own = write(tmp_path / "own.zarr")
    (own / "t2m/c/1/0/0").unlink()
    (own / "t2m/c/1/0/0").symlink_to("../../2/0/0")
    (own / "t2m/c").rename(own / "chunks")
    (own / "t2m/c").symlink_to(own / "chunks")
    (tmp_path / "link.zarr").symlink_to(own)
    for path in (own, tmp_path / "link.zarr"):
        assert (read(str(path)) == 1.0).all()


def test_a_pickled_dataset_and_another_process_refuse_too(tmp_path):
    own, theirs = write(tmp_path / "own.zarr"), write(tmp_path / "theirs.zarr", 666.0)
    ds = jigsaw.io.open(str(own), mesh={"lat": 1}, fields=["t2m"])
    link_chunk(own, theirs)
    again = pickle.loads(pickle.dumps(ds)).source
    with pytest.raises(UnsupportedStoreError, match="outside of the store"):
        again.store.arrays["t2m"].loader.load((1, 0, 0), np.empty(120, np.uint8))
    tables = pickle.loads(pickle.dumps(open_store(str(own)).arrays["t2m"].places.files))
    with pytest.raises(UnsupportedStoreError, match="outside of the store"):
        tables.whole(str(own / "t2m/c/1/0/0"), lambda size: np.empty(size, np.uint8))


def test_commands_and_convert_refuse_and_are_told_what_may_be_read(tmp_path, capsys):
    own, theirs = write(tmp_path / "own.zarr"), write(tmp_path / "theirs.zarr", 666.0)
    link_chunk(own, theirs)
    with pytest.raises(UnsupportedStoreError, match="outside of the store"):
        jigsaw.io.convert(str(own), tmp_path / "made.zarr", chunks={"time": 1})
    made = jigsaw.io.convert(str(own), tmp_path / "made2.zarr", chunks={"time": 1}, outside=[str(theirs)])
    assert (read(made.path) == 666.0).any()
    stats = ["stats", str(own), "--output", str(tmp_path / "s.json"), "--no-progress"]
    convert = ["convert", str(own), str(tmp_path / "made3.zarr"), "--chunks", "time=1"]
    for command in (stats, convert):
        assert main(command) == 1
        assert "outside of the store" in capsys.readouterr().err
        assert main([*command, "--outside", str(theirs), *(["--replace"] if command is convert else [])]) == 0
    link_array(own, theirs)
    for command in (["inspect", str(own)], ["plan", str(own), "--mesh", "lat=2"]):
        assert main(command) == 1
        assert "outside of the store" in capsys.readouterr().err
        assert main([*command, "--outside", "all"]) == 0


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_pipe_in_the_place_of_a_chunk_keeps_nobody_waiting(tmp_path, kind):
    own = write(tmp_path / "own.zarr")
    (own / "t2m/c/1/0/0").unlink()
    (os.mkfifo if kind == "pipe" else os.mkdir)(own / "t2m/c/1/0/0")
    with pytest.raises(CorruptChunkError, match=r"c/1/0/0 .*a folder, pipe or device"):
        read(str(own))
    (own / "lat/zarr.json").unlink()
    os.mkfifo(own / "lat/zarr.json")
    with pytest.raises(ReadError, match="pipe"):
        read(str(own))


@on_ranks(2)
def test_every_rank_is_told(tmp_path):
    import torch.distributed as dist

    if dist.get_rank() == 0:
        link_chunk(write(tmp_path / "own.zarr"), write(tmp_path / "theirs.zarr", 666.0))
    dist.barrier()
    with pytest.raises(ReadError, match="outside of the store"):  # when it is opened, or read
        jigsaw.io.open(str(tmp_path / "own.zarr"), mesh=world_mesh(lat=2), fields=["t2m"])[1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_opened_lies_within_whatever_links_there_are(tmp_path_factory, data):
    top = tmp_path_factory.mktemp("links")
    root, out = top / "s", top / "out"
    for folder in (root / "a" / "b", out / "b"):
        folder.mkdir(parents=True)
    places = [root / "a", root / "a" / "b", root, out, out / "b", top]
    for n in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.sampled_from(places)) / f"l{n}"
        to = data.draw(st.sampled_from([*places, *(p / "f" for p in places), top / "s" / "l0", out / "l1"]))
        at.symlink_to(to if data.draw(st.booleans()) else os.path.relpath(to, at.parent))
    for place in places:
        (place / "f").write_text(str(place))
    bounds = StoreBounds(str(root))
    parts = data.draw(st.lists(st.sampled_from(["a", "b", "f", "..", *(f"l{n}" for n in range(6))]), min_size=1))
    path = os.path.join(root, *parts)
    try:
        handle = bounds.opened(path, os.O_RDONLY)
    except OSError:
        return
    except UnsupportedStoreError:
        assert not os.path.realpath(path).startswith(f"{root}/")
        return
    real = os.readlink(f"/proc/self/fd/{handle}")
    os.close(handle)
    assert real == os.path.realpath(path)
    assert real.startswith(str(root))


@pytest.mark.parametrize("path", ["..", "a/../..", "l/..", "l"])
def test_two_dots_lead_out_of_no_store(tmp_path, path):
    root = tmp_path / "s"
    (root / "a").mkdir(parents=True)
    (root / "l").symlink_to(tmp_path)
    with pytest.raises(UnsupportedStoreError, match="outside of the store"):
        StoreBounds(str(root)).opened(str(root / path), os.O_RDONLY)


def test_a_name_that_leads_out_and_back_into_the_store_is_followed(tmp_path):
    root = tmp_path / "s"
    (root / "a").mkdir(parents=True)
    (root / "a" / "f").write_text("within")
    (tmp_path / "back").symlink_to(root / "a" / "f")
    handle = StoreBounds(str(root)).opened(str(root / ".." / "back"), os.O_RDONLY)
    with os.fdopen(handle) as file:
        assert file.read() == "within"


# -- references ------------------------------------------------------------------------------------------------------


def references_to(target):
    """References of a store whose chunk of step 1 lies in `target`."""
    meta = {"zarr_format": 2, "shape": SHAPE, "chunks": (1, 6, 5), "dtype": "<f4", "compressor": None}
    meta |= {"filters": None, "order": "C", "fill_value": 0}
    found = {".zgroup": json.dumps({"zarr_format": 2})}
    for name, values in {"time": np.arange(4.0), "lat": np.linspace(2, -2, 6), "lon": np.arange(5.0)}.items():
        own = meta | {"shape": values.shape, "chunks": values.shape, "dtype": "<f8", "fill_value": None}
        found[f"{name}/.zarray"] = json.dumps(own)
        found[f"{name}/.zattrs"] = json.dumps({"_ARRAY_DIMENSIONS": [name]})
        found[f"{name}/0"] = "base64:" + base64.b64encode(values.tobytes()).decode()
    found["t2m/.zarray"] = json.dumps(meta)
    found["t2m/.zattrs"] = json.dumps({"_ARRAY_DIMENSIONS": ["time", "lat", "lon"]})
    for step in range(4):
        found[f"t2m/{step}.0.0"] = [target, 0, 120]
    return {"version": 1, "refs": found}


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "home" / "secret"
    path.parent.mkdir()
    path.write_bytes(np.full(30, 666, "f4").tobytes())
    return path


def by_store(references):
    far = {"remote_protocol": "file", "remote_options": {"asynchronous": True}}
    return FsspecStore(fsspec.filesystem("reference", fo=references, asynchronous=True, **far), read_only=True, path="")


def by_mapper(references):
    return fsspec.get_mapper("reference://", fo=references, remote_protocol="file")


def by_xarray(references):
    found = {"consolidated": False, "storage_options": {"fo": references}}
    return xr.open_dataset("reference://", engine="zarr", backend_kwargs=found)


def by_dask(references):
    return by_xarray(references).chunk({"time": 1}) + 0


def by_engine(references):
    return xr.open_dataset(references, engine="kerchunk")


OPENED = [by_store, by_mapper, by_xarray, by_dask, by_engine]


@pytest.mark.parametrize("named", ["{}", "file://{}", "refs/../{}"])
@pytest.mark.parametrize("opened", OPENED)
def test_references_to_other_places_are_refused(tmp_path, secret, opened, named):
    if named == "refs/../{}":
        named = f"{tmp_path}/refs/../home/secret"  # whose beginning is that of the folder
    path = tmp_path / "refs" / "r.json"
    path.parent.mkdir()
    path.write_text(json.dumps(references_to(named.format(secret))))
    with pytest.raises(UnsupportedStoreError, match=r"reference 't2m/\d.0.0' leads to .*secret, outside of .*refs"):
        read(opened(str(path)))
    for allowed in ([str(secret.parent)], str(secret), True, [f"file://{secret.parent}"]):
        assert (read(opened(str(path)), options={"outside": allowed}) == 666).all()
    with pytest.raises(UnsupportedStoreError, match="leads to"):
        read(opened(str(path)), options={"outside": ["s3://bucket", str(tmp_path / "hom")]})


@pytest.mark.parametrize("opened", [by_store, by_mapper, by_xarray])
def test_references_in_a_dictionary_lie_nowhere(secret, opened):
    with pytest.raises(UnsupportedStoreError, match=r"leads to .*outside of what is given"):
        read(opened(references_to(str(secret))))
    assert (read(opened(references_to(str(secret))), options={"outside": [str(secret)]}) == 666).all()


def test_the_url_of_references(tmp_path, secret):
    for references in (references_to(str(secret)), str(tmp_path / "r.json")):
        (tmp_path / "r.json").write_text(json.dumps(references_to("/etc/hostname")))
        options = {"fo": references, "remote_protocol": "file"}
        with pytest.raises(UnsupportedStoreError, match="leads to"):
            read("reference://", options=options)
    options = {"fo": references_to(str(secret)), "remote_protocol": "file", "outside": [str(secret)]}
    ds = jigsaw.io.open("reference://", mesh=world_mesh(lat=1), fields=["t2m"], options=options)
    assert (pickle.loads(pickle.dumps(ds)).source.store.read_small("t2m") == 666).all()
    del options["outside"]
    with pytest.raises(UnsupportedStoreError, match="leads to"):
        open_store("reference://", options).read_small("t2m")


def test_references_beside_the_file_are_followed(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "raw").write_bytes(np.full(30, 5, "f4").tobytes())
    (tmp_path / "r.json").write_text(json.dumps(references_to(str(tmp_path / "data" / "raw"))))
    for opened in OPENED:
        assert (read(opened(str(tmp_path / "r.json"))) == 5).all()
    (tmp_path / "data" / "link").symlink_to("/etc/hostname")
    (tmp_path / "r2.json").write_text(json.dumps(references_to(str(tmp_path / "data" / "link"))))
    for opened in OPENED:
        with pytest.raises(UnsupportedStoreError, match="leads to"):
            read(opened(str(tmp_path / "r2.json")))


def test_references_in_parquet(tmp_path, secret):
    (tmp_path / "refs").mkdir()
    lazy = LazyReferenceMapper.create(str(tmp_path / "refs" / "r.parq"), fs=fsspec.filesystem("file"), record_size=4)
    for key, value in references_to(str(secret))["refs"].items():
        raw = base64.b64decode(value[7:]) if value[:7] == "base64:" else value
        lazy[key] = raw.encode() if isinstance(raw, str) else raw
    lazy.flush()
    for opened in (by_store, by_xarray):
        with pytest.raises(UnsupportedStoreError, match="leads to"):
            read(opened(str(tmp_path / "refs" / "r.parq")))
        assert (read(opened(str(tmp_path / "refs" / "r.parq")), options={"outside": [str(secret)]}) == 666).all()


def test_convert_of_references(tmp_path, secret):
    (tmp_path / "refs").mkdir()
    path = tmp_path / "refs" / "r.json"
    path.write_text(json.dumps(references_to(str(secret))))
    how = {"engine": "kerchunk", "chunks": {"time": 1}}
    for source, engine in ((str(path), "kerchunk"), (by_xarray(str(path)), None)):
        with pytest.raises(UnsupportedStoreError, match="leads to"):
            jigsaw.io.convert(source, tmp_path / "made.zarr", **how | {"engine": engine})
    made = jigsaw.io.convert(str(path), tmp_path / "made.zarr", **how, outside=[str(secret)])
    assert (read(made.path) == 666).all()


def test_virtual_chunks_of_icechunk_follow_its_own_rules(tmp_path, secret):
    place = f"file://{secret.parent}/"
    config = icechunk.RepositoryConfig.default()
    config.set_virtual_chunk_container(
        icechunk.VirtualChunkContainer(place, icechunk.local_filesystem_store(str(secret.parent)))
    )
    storage = icechunk.local_filesystem_storage(str(tmp_path / "ice"))
    repo = icechunk.Repository.create(storage, config, authorize_virtual_chunk_access={place: None})
    session = repo.writable_session("main")
    group = zarr.create_group(session.store)
    for name, values in {"time": np.arange(4.0), "lat": np.linspace(2, -2, 6), "lon": np.arange(5.0)}.items():
        group.create_array(name, data=values, dimension_names=[name])
    names = ["time", "lat", "lon"]
    how = {"compressors": None, "filters": None, "dimension_names": names}
    group.create_array("t2m", shape=SHAPE, chunks=(1, 6, 5), dtype="f4", **how)
    for step in range(4):
        session.store.set_virtual_ref(f"t2m/c/{step}/0/0", f"{place}secret", offset=0, length=120)
    session.commit("virtual")
    allowed = icechunk.Repository.open(storage, authorize_virtual_chunk_access={place: None})
    assert (read(allowed.readonly_session("main").store) == 666).all()
    stranger = icechunk.Repository.open(storage).readonly_session("main").store
    for store in (stranger, pickle.loads(pickle.dumps(stranger))):
        with pytest.raises(ReadError, match="t2m"):
            read(store)
