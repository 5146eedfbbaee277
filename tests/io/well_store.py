"""Files of The Well, written by h5py as its specification says."""

from typing import Any, NamedTuple

import h5py
import numpy as np

RUNS, STEPS = 3, 5
PLANE, BOX = {"x": 7, "y": 10}, {"r": 5, "theta": 7, "phi": 6}
STORAGE: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunks": {"chunks": "step"},
    "gzip": {"chunks": "step", "compression": "gzip", "shuffle": True},
    "split": {"chunks": "split", "compression": "gzip"},  # a chunk has some of the components alone
}


class Field(NamedTuple):
    """Stored values, whether they differ by run and by step, and the dim of space along which they do not."""

    values: np.ndarray
    by_run: bool = True
    by_step: bool = True
    lacking: int | None = None


def make_fields(space, first=0, runs=RUNS, steps=STEPS):
    """Return a field of each kind, by group and name; other files have other numbers in `first`."""
    sizes, draw = tuple(space.values()), np.random.default_rng(first)

    def numbers(*shape):
        return draw.normal(size=shape).astype("f4")

    return {
        ("t0_fields", "density"): Field(numbers(runs, steps, *sizes)),
        ("t0_fields", "depth"): Field(np.arange(np.prod(sizes), dtype="f4").reshape(sizes), False, False),
        ("t0_fields", "speed"): Field(numbers(runs, *sizes), True, False),
        ("t0_fields", "inflow"): Field(numbers(runs, steps, *sizes[1:]), True, True, 0),
        ("t0_fields", "outflow"): Field(numbers(runs, steps, 1, *sizes[1:]), True, True, 0),  # as its reader needs it
        ("t1_fields", "velocity"): Field(numbers(runs, steps, *sizes, len(sizes))),
        ("t2_fields", "D"): Field(numbers(runs, steps, *sizes, len(sizes), len(sizes))),
    }


def make_scalars(first=0, runs=RUNS, steps=STEPS):
    draw = np.random.default_rng(1000 + first)
    return {
        "Re": Field(np.array([100.0 + first], "f4"), False, False),
        "gain": Field(draw.normal(size=steps).astype("f4"), False, True),
        "force": Field(draw.normal(size=(runs, steps)), True, True),
    }


def write_well(path, space=PLANE, storage="contiguous", first=0, runs=RUNS, steps=STEPS, above="OPEN"):
    fields, scalars = make_fields(space, first, runs, steps), make_scalars(first, runs, steps)
    with h5py.File(path, "w") as f:
        f.attrs.update({"dataset_name": "made", "grid_type": "cartesian", "n_spatial_dims": len(space)})
        f.attrs.update({"n_trajectories": runs, "simulation_parameters": ["Re"], "Re": 100.0 + first})
        dims = f.create_group("dimensions")
        dims.attrs["spatial_dims"] = list(space)
        dims["time"] = (0.1 + first) * np.arange(steps, dtype="f4")
        dims["time"].attrs["sample_varying"] = False
        for d, n in space.items():
            dims[d] = np.linspace(0, 1, n, dtype="f4")
            dims[d].attrs.update({"sample_varying": False, "time_varying": False})
        write_boundaries(f, space, above)
        f.create_group("scalars").attrs["field_names"] = list(scalars)
        for name, field in scalars.items():
            write_field(f["scalars"], name, field)
        for group in ("t0_fields", "t1_fields", "t2_fields"):
            f.create_group(group).attrs["field_names"] = [name for owner, name in fields if owner == group]
        for (group, name), field in fields.items():
            made = write_field(f[group], name, field, **STORAGE[storage])
            made.attrs["dim_varying"] = [d != field.lacking for d in range(len(space))]
    return str(path)


def write_field(group, name, field, **how):
    if "chunks" in how:
        lead, split = field.by_run + field.by_step, how["chunks"] == "split"
        how["chunks"] = (1,) * lead + tuple(max(1, n // 2) if split else n for n in field.values.shape[lead:])
    made = group.create_dataset(name, data=field.values, **how)
    made.attrs.update({"sample_varying": field.by_run, "time_varying": field.by_step})
    return made


def write_boundaries(file, space, above):
    """Write them: the first dim wraps; the second is open below and has `above`; a wall stands inside."""
    first, second = list(space)[:2]
    for name, dims, kind, rows in (
        ("around", [first], "PERIODIC", [0, -1]),
        ("below", [second], "WALL", [0]),
        ("over", [second], above, [-1]),
        ("inside", [first, second], "WALL", []),
    ):
        group = file.create_group(f"boundary_conditions/{name}")
        group.attrs.update({"associated_dims": dims, "associated_fields": [], "bc_type": kind})
        group.attrs.update({"sample_varying": False, "time_varying": False})
        mask = np.zeros([space[d] for d in dims], bool)
        if rows:
            mask[rows] = True
        else:
            mask[2:4, 3:5] = True
        group["mask"] = mask
