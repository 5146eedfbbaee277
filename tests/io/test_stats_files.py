"""Files of statistics: jigsaw's own, makani's and GraphCast's, and what `normalize=` makes of them."""

import json

import numpy as np
import pytest
import xarray as xr
from globe_store import globe, stacked

import jigsaw
from jigsaw.errors import FieldError
from jigsaw.io.series.statistics import ALL_STATISTICS, Statistics
from jigsaw.testing import world_mesh

FIELDS = ["z500", "t2m", "temperature@850"]
LONG = ["geopotential@500", "2m_temperature", "temperature@850"]
MEAN, STD = np.array([5e4, 280.0, 270.0]), np.array([900.0, 11.0, 12.0])


def normalized(path, normalize, fields=FIELDS):
    ds = jigsaw.io.open(path, mesh=world_mesh(lat=1), fields=fields, normalize=normalize, dtype="float64")
    return ds[3].input.local[0].numpy()


def wanted(path, mean=MEAN, std=STD):
    return (stacked(path, LONG)[3] - mean[:, None, None]) / std[:, None, None]


def some(fields=("geopotential@500", "2m_temperature", "temperature@850", "w@500")):
    r = np.random.default_rng(0)
    columns = {name: r.normal(5, 1, len(fields)) for name in ALL_STATISTICS}
    columns["mean"][:3], columns["std"][:3] = MEAN, STD
    columns["diff_std"][3] = np.nan
    return Statistics(tuple(fields), columns, {"steps": 10, "store": "a store", "weights": "none"})


@pytest.mark.parametrize("suffix", [".nc", ".npz", ".json"])
def test_what_is_written_is_read_again(wb2, tmp_path, suffix):
    path = tmp_path / f"stats{suffix}"
    some().write(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    found = Statistics.read(path)
    assert found.fields == some().fields
    assert dict(found.attrs) == dict(some().attrs)
    for name, values in some().columns.items():
        np.testing.assert_array_equal(found.columns[name], values)
    assert found["w@500"].keys() == set(ALL_STATISTICS) and list(found) == list(some().fields)
    with pytest.raises(KeyError, match="'t' is none of the channels "):
        _ = found["t"]
    for normalize in (str(path), path, found):
        np.testing.assert_allclose(normalized(wb2, normalize), wanted(wb2), rtol=1e-6, atol=1e-6)


def test_other_programs_read_them(tmp_path):
    some().write(tmp_path / "stats.nc")
    with xr.open_dataset(tmp_path / "stats.nc") as data:
        assert data.channel.values.tolist() == list(some().fields)
        np.testing.assert_array_equal(data["diff_std"].values, some().columns["diff_std"])
    some().write(tmp_path / "stats.json")
    channels = json.loads((tmp_path / "stats.json").read_text())["channels"]
    assert channels[1]["name"] == "2m_temperature" and channels[1]["mean"] == 280.0
    assert channels[3]["diff_std"] is None


# -- makani ------------------------------------------------------------------------------------------------------------


def makani(folder, channels=3, **more):
    columns = {"global_means": MEAN, "global_stds": STD, "time_diff_stds": STD / 10, "mins": MEAN - 1, **more}
    for name, values in columns.items():
        np.save(folder / f"{name}.npy", values.reshape(1, -1, 1, 1)[:, :channels])
    np.save(folder / "time_means.npy", np.zeros((1, 3, 13, 16), "f4"))  # a map, which is none of ours
    return folder


def test_makanis_files_normalize_in_the_order_of_channels(wb2, tmp_path):
    folder = makani(tmp_path)
    for path in (folder, folder / "global_means.npy", folder / "global_stds.npy"):
        found = Statistics.read(path)
        assert found.fields == () and found.channels == 3
        np.testing.assert_array_equal(found.columns["diff_std"], STD / 10)
        np.testing.assert_array_equal(found.columns["min"], MEAN - 1)
        assert "max" not in found.columns
        np.testing.assert_allclose(normalized(wb2, path), wanted(wb2), rtol=1e-6, atol=1e-6)
    named = Statistics.read(folder, fields=["t850", "z500", "t2m"])
    turned = wanted(wb2, MEAN[[1, 2, 0]], STD[[1, 2, 0]])
    np.testing.assert_allclose(normalized(wb2, named), turned, rtol=1e-6, atol=1e-6)


def test_makanis_files_without_names_must_have_as_many_channels(wb2, tmp_path):
    with pytest.raises(FieldError, match=r"has 3 channels without names and the dataset has 2; name them: Statistics"):
        normalized(wb2, makani(tmp_path), ["z500", "t2m"])
    with pytest.raises(FieldError, match=r"fields=\['t2m'\] are 1 names and .* has 3 channels"):
        Statistics.read(tmp_path, fields=["t2m"])
    np.save(tmp_path / "global_stds.npy", np.ones((1, 4, 1, 1)))
    with pytest.raises(FieldError, match=r"every statistic needs a number a channel"):
        Statistics.read(tmp_path)
    np.save(tmp_path / "global_stds.npy", np.ones((1, 3, 2, 1)))
    with pytest.raises(FieldError, match=r"global_stds.npy is float64\[1, 3, 2, 1\]; a statistic is \[1, C, 1, 1\]"):
        Statistics.read(tmp_path)


def test_one_file_a_statistic(wb2, tmp_path):
    np.save(tmp_path / "m.npy", MEAN.astype("f4"))
    np.save(tmp_path / "s.npy", STD)
    found = Statistics.read({"mean": tmp_path / "m.npy", "std": str(tmp_path / "s.npy")}, fields=FIELDS)
    np.testing.assert_allclose(normalized(wb2, found), wanted(wb2), rtol=1e-6, atol=1e-6)
    with pytest.raises(FieldError, match=r"\['median'\] is not a statistic; they are \['count'"):
        Statistics.read({"median": tmp_path / "m.npy"})


# -- GraphCast ---------------------------------------------------------------------------------------------------------


def graphcast(folder, path_prefix="", engine=None):
    """As GraphCast publishes them: reductions by xarray over all dims but the level."""
    data = globe()
    steps = data.diff("time")
    over = ["time", "latitude", "longitude"]

    def reduced(x, how):
        return xr.Dataset({n: getattr(v, how)([d for d in over if d in v.dims]) for n, v in x.data_vars.items()})

    files = {
        "mean_by_level": reduced(data, "mean").assign(year_progress=0.5),
        "stddev_by_level": reduced(data, "std").assign(year_progress=0.3),
        "diffs_stddev_by_level": reduced(steps, "std").drop_vars("land_sea_mask"),
    }
    for name, x in files.items():
        x.drop_vars("time", errors="ignore").to_netcdf(folder / f"{path_prefix}{name}.nc", engine=engine)
    return files


@pytest.mark.parametrize("prefix", ["", "stats_", "gencast_stats_"])
def test_graphcasts_files(wb2, tmp_path, prefix):
    files = graphcast(tmp_path, prefix)
    mean, std = (
        np.array(
            [float(x.geopotential.sel(level=500)), float(x["2m_temperature"]), float(x.temperature.sel(level=850))]
        )
        for x in (files["mean_by_level"], files["stddev_by_level"])
    )
    for path in (tmp_path, tmp_path / f"{prefix}mean_by_level.nc", tmp_path / f"{prefix}diffs_stddev_by_level.nc"):
        np.testing.assert_allclose(normalized(wb2, str(path)), wanted(wb2, mean, std), rtol=1e-4, atol=1e-5)
    found = Statistics.read(tmp_path)
    assert {"geopotential@700", "temperature@500", "2m_temperature", "year_progress"} <= set(found.fields)
    apart = np.diff(globe().temperature.sel(level=850).values.astype("f8"), axis=0).std()
    np.testing.assert_allclose(found["temperature@850"]["diff_std"], apart, rtol=1e-5)
    assert np.isnan(found["land_sea_mask"]["diff_std"])


def test_a_folder_of_two_sets_wants_a_name(wb2, tmp_path):
    graphcast(tmp_path, "a_")
    graphcast(tmp_path, "b_")
    with pytest.raises(
        FieldError, match=r"has several sets of statistics, such as a_.* and b_.*; name one of the files"
    ):
        Statistics.read(tmp_path)
    assert len(Statistics.read(tmp_path / "b_mean_by_level.nc")) == 9


# -- refused -----------------------------------------------------------------------------------------------------------


def test_what_normalize_cannot_be(wb2, tmp_path):
    with pytest.raises(FieldError, match=r"there is no file or folder of statistics '.*/none.nc'"):
        normalized(wb2, tmp_path / "none.nc")
    with pytest.raises(FieldError, match=r"has neither global_means.npy and global_stds.npy \(makani\) nor"):
        normalized(wb2, tmp_path)
    some(("geopotential@500", "2m_temperature", "temperature@700", "w@500")).write(tmp_path / "s.json")
    with pytest.raises(FieldError, match=r"s.json has no channel 'temperature@850'; it has geopotential@500, 2m_temp"):
        normalized(wb2, tmp_path / "s.json")
    Statistics(("t2m",), {"mean": np.zeros(1)}).write(tmp_path / "m.npz")
    with pytest.raises(FieldError, match=r"m.npz has no 'std'; it has \['mean'\]"):
        normalized(wb2, tmp_path / "m.npz", ["t2m"])
    Statistics(("t2m",), {"mean": np.zeros(1), "std": np.zeros(1)}).write(tmp_path / "z.npz")
    with pytest.raises(FieldError, match=r"gives channel 't2m' mean 0 and std 0"):
        normalized(wb2, tmp_path / "z.npz", ["t2m"])
    with pytest.raises(FieldError, match=r"normalize has 't2m' and '2t', two names of channel 't2m'; keep the one"):
        normalized(wb2, {"t2m": (280.0, 2.0), "2t": (0.0, 1.0)}, ["t2m"])
    with pytest.raises(FieldError, match=r"normalize has 't2m' and '2m_temperature', two names of channel 't2m'"):
        normalized(wb2, {"t2m": (280.0, 2.0), "2m_temperature": (0.0, 1.0)}, ["t2m"])
    some(("2t", "2m_temperature", "temperature@700", "w@500")).write(tmp_path / "t.json")
    with pytest.raises(FieldError, match=r"t.json has '2t' and '2m_temperature', two names of channel 't2m'; give its"):
        normalized(wb2, tmp_path / "t.json", ["t2m"])
    with pytest.raises(FieldError, match=r"statistics are written as .nc, .npz, .json, not 'a.txt'"):
        some().write("a.txt")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.json", b"{", "cannot be read as statistics"),
        ("a.json", b'{"t2m": 3}', "has no format 'jigsaw statistics 1'"),
        ("a.json", b"[]", "has no format"),
        ("a.npz", b"PK\x03\x04 torn", "cannot be read as statistics"),
        ("a.nc", b"CDF", "cannot be read as statistics"),
        ("a.yaml", b"", "end in '.yaml'; known are .nc, .npz, .json"),
    ],
)
def test_files_that_are_no_statistics(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FieldError, match=match):
        Statistics.read(tmp_path / name)


def test_a_foreign_netcdf_is_named(tmp_path):
    xr.Dataset({"a": ("x", [1.0])}).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(FieldError, match=r"is not named like GraphCast's .*; for a file that holds one statistic use"):
        Statistics.read(tmp_path / "a.nc")


@pytest.mark.parametrize("suffix", [".nc", ".npz", ".json"])
def test_what_is_not_statistics_is_not_replaced(tmp_path, suffix):
    stats = some()
    own, theirs = tmp_path / f"own{suffix}", tmp_path / f"theirs{suffix}"
    for _ in range(2):  # statistics replace statistics
        stats.write(own)
    theirs.write_bytes(b'{"a": 1}')
    with pytest.raises(FieldError, match=r"theirs.* is there and does not hold statistics"):
        stats.write(theirs)
    assert theirs.read_bytes() == b'{"a": 1}'
