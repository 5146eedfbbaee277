"""Multi-frame DICOM as pydicom reads it: values, places of frames, segments; files that lack frames or lie."""

import contextlib

import numpy as np
import pydicom
import pytest
import SimpleITK
from pydicom.dataset import Dataset, FileMetaDataset

from jigsaw.errors import (
    CorruptChunkError,
    GridError,
    MissingArrayError,
    ReadError,
    TruncatedError,
    UnsupportedStoreError,
)
from jigsaw.io import open_volumes
from jigsaw.io.formats.dicom import open_dicom
from jigsaw.io.formats.slab_arrays import read_table_box
from jigsaw.testing import run_on_ranks, world_mesh

SHAPE = (7, 10, 13)
TURNED = [0.8, 0.6, 0, -0.6, 0.8, 0]  # rows and columns; slices lie along z
ENHANCED_CT, SEGMENTATION = "1.2.840.10008.5.1.4.1.1.2.1", "1.2.840.10008.5.1.4.1.1.66.4"
ORDER = (3, 0, 6, 1, 5, 2, 4)  # the frame that lies at each row along z


def item(**values):
    made = Dataset()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def frame_groups(z, slope=None, stack=None, time=None, segment=None):
    """The functional groups of a frame at `z` mm."""
    groups = item(PlanePositionSequence=[item(ImagePositionPatient=[-4, 5, z])])
    if slope is not None:
        groups.PixelValueTransformationSequence = [item(RescaleSlope=slope[0], RescaleIntercept=slope[1])]
    marks = {"StackID": stack, "TemporalPositionIndex": time}
    groups.FrameContentSequence = [item(**{name: mark for name, mark in marks.items() if mark is not None})]
    if segment is not None:
        groups.SegmentIdentificationSequence = [item(ReferencedSegmentNumber=segment)]
    return groups


def save(path, frames, groups, bits=16, spacing=2.5, syntax=pydicom.uid.ExplicitVRLittleEndian, **values):
    """A file of frames [N, rows, columns] with these functional groups."""
    file = item(
        SOPClassUID=ENHANCED_CT, SOPInstanceUID="1.2.3", PatientName="", PatientID="", Modality="CT",
        PerFrameFunctionalGroupsSequence=groups,
        SharedFunctionalGroupsSequence=[item(
            PlaneOrientationSequence=[item(ImageOrientationPatient=TURNED)],
            PixelMeasuresSequence=[item(PixelSpacing=[0.5, 0.75], SpacingBetweenSlices=spacing, SliceThickness=2.5)],
        )],
    )  # fmt: skip
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    file.set_pixel_data(frames, "MONOCHROME2", bits, generate_instance_uid=False)
    for name, value in values.items():
        setattr(file, name, value)
    if syntax.is_encapsulated:
        file.compress(syntax, generate_instance_uid=False)
    elif not syntax.is_little_endian:
        file.PixelData = frames.byteswap().tobytes()
    file.file_meta.TransferSyntaxUID = syntax
    file.save_as(path, enforce_file_format=True)
    return str(path)


def scan(shape=SHAPE, dtype="i2"):
    return np.random.default_rng(0).integers(-900, 900, shape).astype(dtype)


def save_scan(path, slopes=None, **options):
    """The scan, its frames in another order than they lie in; unused bits are 0, also of negative values."""
    values = scan()
    if options.get("BitsStored") == 12:
        values &= 0x0FFF
    shuffled, groups = np.empty_like(values), [None] * len(values)
    for z, frame in enumerate(ORDER):
        shuffled[frame] = values[z]
        groups[frame] = frame_groups(2.5 * z, slopes[z] if slopes else (2, -1024))
    return save(path, shuffled, groups, **options)


def read_array(store, name="image"):
    table = store.arrays[name]
    values = read_table_box(table, tuple((0, n) for n in table.shape))
    return values * table.scale + table.offset


def affine_of_ras():
    right, down = np.reshape(TURNED, (2, 3))
    affine = np.eye(4)
    affine[:3] = np.c_[right * 0.75, down * 0.5, [0, 0, 2.5], [-4, 5, 0]]
    return np.diag([-1, -1, 1, 1]) @ affine


@pytest.mark.parametrize("stored", [12, 16])
@pytest.mark.parametrize(
    "syntax", ["ExplicitVRLittleEndian", "ImplicitVRLittleEndian", "ExplicitVRBigEndian", "RLELossless"]
)
def test_values_lie_where_frames_say(tmp_path, syntax, stored):
    path = save_scan(tmp_path / "ct.dcm", syntax=getattr(pydicom.uid, syntax), BitsStored=stored, HighBit=stored - 1)
    store = open_dicom(path)
    assert np.array_equal(read_array(store), pydicom.pixels.pixel_array(path)[list(ORDER)] * 2.0 - 1024)
    assert np.array_equal(read_array(store), scan() * 2.0 - 1024)
    np.testing.assert_allclose(store.attrs["affine"], affine_of_ras(), atol=1e-12)


def test_the_affine_is_that_of_itk(tmp_path):
    values = scan()
    path = save(tmp_path / "ct.dcm", values, [frame_groups(2.5 * z, (2, -1024)) for z in range(7)])
    image = SimpleITK.ReadImage(path)
    (opened,) = open_volumes([path], mesh={}, crop=None).images
    (loaded,) = open_volumes([image], mesh={}, crop=None).images
    np.testing.assert_allclose(opened.affine, loaded.affine, atol=1e-9)
    assert np.array_equal(read_array(open_dicom(path)), SimpleITK.GetArrayFromImage(image))


def test_each_frame_has_its_slope(tmp_path):
    slopes = [(1 + z / 4, -z) for z in range(7)]
    store = open_dicom(save_scan(tmp_path / "pet.dcm", slopes=slopes))
    factors, offsets = (np.reshape(each, (7, 1, 1)) for each in zip(*slopes, strict=True))
    assert store.arrays["image"].dtype == "<f4"
    assert np.array_equal(read_array(store), (scan() * factors + offsets).astype("f4"))


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scans")
    forms = {"plain": {}, "bits": {"BitsStored": 12, "HighBit": 11}, "rle": {"syntax": pydicom.uid.RLELossless}}
    return [save_scan(folder / f"{name}.dcm", **options) for name, options in forms.items()]


@pytest.mark.parametrize("axes", [{"z": 2}, {"z": 4}, {"z": 2, "x": 2}, {"y": 3}], ids=str)
def test_a_rank_reads_its_own_frames_on_every_mesh(scans, axes):
    run_on_ranks(int(np.prod(list(axes.values()))), check_tiles, scans, axes)


def check_tiles(scans, axes):
    mesh, wholes = world_mesh(**axes), []
    for path in scans:
        volumes = open_volumes([path], mesh=mesh, crop=None, orientation="RAS", mode="independent")
        tile = volumes.whole(0).image
        wholes.append(tile.full_tensor()[0].numpy())
        read = volumes._engine.stats.stored_bytes
        assert "rle" in path or read == tile.local.shape[1] * 10 * 13 * 2  # its frames alone
    assert all(np.array_equal(whole, (scan() * 2.0 - 1024)[:, ::-1, ::-1]) for whole in wholes)


# -- stacks and segments ---------------------------------------------------------------------------------------------


def test_stacks_and_times_are_arrays_of_their_own(tmp_path):
    values = scan((8, 5, 6))
    groups = [frame_groups(2.5 * (i % 4 // 2), stack=str(1 + i // 4), time=1 + i % 2) for i in range(8)]
    path = save(tmp_path / "mr.dcm", values, groups)
    store = open_dicom(path)
    assert sorted(store.arrays) == [f"stack {s}, time {t}" for s in (1, 2) for t in (1, 2)]
    assert np.array_equal(read_array(store, "stack 2, time 1"), values[[4, 6]])
    with pytest.raises(MissingArrayError, match=r"has 4 arrays .*stack 1, time 1.*name it by image_array="):
        open_volumes([path], mesh={}, crop=None)
    chosen = open_volumes([path], mesh=world_mesh(z=1), crop=None, image_array="stack 1, time 2").whole(0)
    assert np.array_equal(chosen.image.local[0], values[[1, 3]])


def save_segments(path, values, left_out, **options):
    """Segments [S, z, rows, columns] as frames, without those that `left_out` names by (segment, z)."""
    kept = [i for i in np.ndindex(values.shape[:2]) if i not in left_out]
    groups = [frame_groups(2.5 * z, segment=s + 1) for s, z in kept]
    names = [item(SegmentNumber=s + 1, SegmentLabel=f"organ {s}") for s in range(len(values))]
    frames = np.stack([values[i] for i in kept])
    described = {"SOPClassUID": SEGMENTATION, "SegmentSequence": names, "SegmentationType": "BINARY"}
    return save(path, frames, groups, bits=8, **described, **options)


def packed(values):
    """Values of 0 and 1 as bits, where frames share bytes."""
    return {"PixelData": pydicom.pixels.pack_bits(values), "BitsAllocated": 1, "BitsStored": 1, "HighBit": 0}


def test_segments_are_channels_and_what_they_leave_out_is_zero(tmp_path):
    values = (scan((2, 6, 5, 7)) > 300).astype("u1")
    left_out = {(0, 2), (1, 2), (1, 4)}
    for at in left_out:
        values[at] = 0
    kept = np.stack([values[i] for i in np.ndindex(2, 6) if i not in left_out])
    path = save_segments(tmp_path / "seg.dcm", values, left_out, **packed(kept))
    assert np.array_equal(pydicom.pixels.pixel_array(path), kept)
    store = open_dicom(path)
    assert np.array_equal(read_array(store), values) and store.attrs["segments"] == ["organ 0", "organ 1"]
    image = np.ones((6, 5, 7), "f4")
    labels = open_volumes([image], [path], mesh=world_mesh(z=1), crop=None).whole(0).label
    assert np.array_equal(labels.local, values)  # a frame that is left out is no missing chunk
    path = save_segments(tmp_path / "gap.dcm", values, left_out, spacing=None)
    with pytest.raises(GridError, match=r"frames of 'image' are missing, or lie unevenly: slices are 2.5 to 5 mm"):
        open_dicom(path)


def test_a_segmentation_may_be_fractions_or_a_label_map(tmp_path):
    values = scan((1, 4, 5, 7)).astype("u1")
    fractions = {"SegmentationType": "FRACTIONAL", "MaximumFractionalValue": 200}
    path = save_segments(tmp_path / "part.dcm", values, set())
    file = pydicom.dcmread(path)
    for name, value in fractions.items():
        setattr(file, name, value)
    file.save_as(path)
    np.testing.assert_allclose(read_array(open_dicom(path)), values[0] / 200)
    groups = [frame_groups(2.5 * z) for z in (0, 1, 3)]
    names = [item(SegmentNumber=n, SegmentLabel=str(n)) for n in range(256)]
    path = save(tmp_path / "map.dcm", values[0, :3], groups, bits=8, SegmentationType="LABELMAP", SegmentSequence=names)
    assert np.array_equal(read_array(open_dicom(path)), np.insert(values[0, :3], 2, 0, axis=0))


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depths", "kind", "match"),
    [
        ([0, 2.5, 7.5, 10], GridError, r"frames of 'image' are missing, or lie unevenly: slices are 2.5 to 5 mm apart"),
        ([0, 2.5, 5.02, 7.5], GridError, r"frame 3 is 0.02 mm beside its row"),
        ([0, 2.5, 2.5, 5], GridError, r"frames 2 and 3 of 'image' lie in the same place, as those of several echoes"),
    ],
)
def test_frames_that_make_no_volume(tmp_path, depths, kind, match):
    path = save(tmp_path / "ct.dcm", scan((4, 5, 6)), [frame_groups(z) for z in depths])
    with pytest.raises(kind, match=match):
        open_volumes([path], mesh={}, crop=None)


def changed(path, change):
    file = pydicom.dcmread(path)
    change(file)
    file.save_as(path)
    return path


def lose_slope(file):
    del file.PerFrameFunctionalGroupsSequence[2].PixelValueTransformationSequence


def lose_place(file):
    del file.PerFrameFunctionalGroupsSequence[2].PlanePositionSequence


def turn_frame(file):
    own = file.PerFrameFunctionalGroupsSequence[2]
    own.PlaneOrientationSequence = [item(ImageOrientationPatient=[0, 1, 0, 0, 0, -1])]


def be_one_slice(file):
    del file.PerFrameFunctionalGroupsSequence


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (lose_slope, UnsupportedStoreError, "frame 3 has no PixelValueTransformationSequence and others have one"),
        (lose_place, UnsupportedStoreError, "frame 3 has no ImagePositionPatient.*write it with PlanePositionSequence"),
        (turn_frame, GridError, "frame 3 of 'image' lies along other directions"),
        (be_one_slice, UnsupportedStoreError, "a DICOM file of one slice.*docs/medical.md"),
        (lambda file: setattr(file, "NumberOfFrames", 8), CorruptChunkError, "says 8 frames of 10 x 13, and describes"),
        (lambda file: setattr(file, "SamplesPerPixel", 3), UnsupportedStoreError, "has 3 samples a pixel"),
        (lambda file: setattr(file, "Rows", 4000), TruncatedError, "and the file has"),
    ],
)  # fmt: skip
def test_files_that_are_refused(tmp_path, change, kind, match):
    with pytest.raises(kind, match=match):
        open_volumes([changed(save_scan(tmp_path / "ct.dcm"), change)], mesh={}, crop=None)


@pytest.mark.filterwarnings("ignore::UserWarning:pydicom")
def test_damaged_files_are_told(tmp_path):
    good = (tmp_path / "good.dcm", tmp_path / "bad.dcm")
    save_scan(good[0])
    raw, random = good[0].read_bytes(), np.random.default_rng(0)
    heads = raw[: len(raw) - scan().nbytes]
    for stop in random.integers(132, len(raw) - 1, 20):
        good[1].write_bytes(raw[:stop])
        with pytest.raises(ReadError):
            open_dicom(good[1])
    for at, value in zip(random.integers(132, len(heads), 150), random.integers(0, 256, 150), strict=True):
        good[1].write_bytes(raw[:at] + bytes([value]) + raw[at + 1 :])
        with contextlib.suppress(ReadError):
            read_array(open_dicom(good[1]))
