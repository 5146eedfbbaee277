"""Folders as nnU-Net, the Decathlon and BIDS lay them out, opened."""

import json

import nibabel
import numpy as np
import pytest
from volume_store import image, label

from jigsaw.errors import FieldError
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.scan_folders import find_scans
from jigsaw.testing import world_mesh


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def named(root, found):
    return [[p and p.removeprefix(f"{root}/") for p in paths] for paths in found.images], found.labels and [
        p and p.removeprefix(f"{root}/") for p in found.labels
    ]


def test_nnunet_folders_open_with_their_channels(tmp_path):
    values = {}
    names = [f"imagesTr/{case}_000{k}" for case in "ba" for k in (0, 1)]
    for i, name in enumerate([*names, "labelsTr/b"]):
        values[name] = label((8, 9, 7)) if "labels" in name else image((8, 9, 7), i)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(values[name], np.eye(4)), tmp_path / f"{name}.nii.gz")
    (tmp_path / "dataset.json").write_text(json.dumps({"channel_names": {"0": "T1", "1": "FLAIR"}}))
    found = find_scans(tmp_path)
    assert named(tmp_path, found) == (
        [[f"imagesTr/{c}_000{k}.nii.gz" for k in (0, 1)] for c in "ab"],
        [None, "labelsTr/b.nii.gz"],
    )
    sample = open_volumes(*found, mesh=world_mesh(z=1), crop=(7, 9, 8))[1]
    np.testing.assert_array_equal(sample.image.local[1], values["imagesTr/b_0001"].T)
    np.testing.assert_array_equal(sample.label.local[0], values["labelsTr/b"].T)
    chosen = find_scans(tmp_path, channels=["FLAIR"])
    assert named(tmp_path, chosen)[0] == [["imagesTr/a_0001.nii.gz"], ["imagesTr/b_0001.nii.gz"]]
    with pytest.raises(FieldError, match=r"channels=\['T2'\]: .*dataset.json names T1, FLAIR, not 'T2'"):
        find_scans(tmp_path, channels=["T2"])
    (tmp_path / "imagesTr" / "a_0001.nii.gz").unlink()
    with pytest.raises(FieldError, match="scan a has no channel 0001; it has 0000: name those that all have"):
        find_scans(tmp_path)
    lacking = find_scans(tmp_path, allow_absent=True)
    assert named(tmp_path, lacking)[0] == [
        ["imagesTr/a_0000.nii.gz", None],
        [f"imagesTr/b_000{k}.nii.gz" for k in (0, 1)],
    ]
    sample = open_volumes(*lacking, mesh=world_mesh(z=1), crop=(7, 9, 8), absent_fill=-1)[0]
    assert sample.present.tolist() == [True, False] and (sample.image.local[1] == -1).all()
    (tmp_path / "imagesTr" / "b_0000.nii.gz").unlink()  # its number alone could be that of a case
    assert named(tmp_path, find_scans(tmp_path, allow_absent=True))[0][1] == [None, "imagesTr/b_0001.nii.gz"]
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(FieldError, match=r"allow_absent=True: .*dataset.json names no channels"):
        find_scans(tmp_path, allow_absent=True)
    touch(tmp_path, "imagesTs/c_0000.nii")
    assert named(tmp_path, find_scans(tmp_path, part="Ts")) == ([["imagesTs/c_0000.nii"]], None)


def test_the_decathlons_numbers_are_cases(tmp_path):
    touch(tmp_path, *(f"{kind}Tr/la_{n:04d}.nii.gz" for kind in ("images", "labels") for n in (7, 3)))
    assert named(tmp_path, find_scans(tmp_path)) == (
        [["imagesTr/la_0003.nii.gz"], ["imagesTr/la_0007.nii.gz"]],
        ["labelsTr/la_0003.nii.gz", "labelsTr/la_0007.nii.gz"],
    )
    touch(tmp_path, *(f"imagesTs/la_{n:04d}.nii.gz" for n in (2, 1)))  # without labels to tell by
    assert named(tmp_path, find_scans(tmp_path, part="Ts"))[0] == [[f"imagesTs/la_000{n}.nii.gz"] for n in (1, 2)]
    (tmp_path / "dataset.json").write_text("[]")
    with pytest.raises(FieldError, match="does not say which channels there are"):
        find_scans(tmp_path)


def test_bids_folders(tmp_path):
    one, two = "sub-01/ses-1/anat/sub-01_ses-1", "sub-02/anat/sub-02"
    touch(tmp_path, f"{one}_T1w.nii.gz", f"{one}_FLAIR.nii.gz", f"{two}_acq-fast_T1w.nii.gz", f"{two}_FLAIR.nii.gz")
    touch(tmp_path, f"derivatives/manual/{two}_space-orig_dseg.nii.gz", f"derivatives/manual/{two}_T1w.nii.gz")
    found = find_scans(tmp_path, channels=["T1w", "FLAIR"])
    assert named(tmp_path, found) == (
        [[f"{one}_T1w.nii.gz", f"{one}_FLAIR.nii.gz"], [f"{two}_acq-fast_T1w.nii.gz", f"{two}_FLAIR.nii.gz"]],
        [None, f"derivatives/manual/{two}_space-orig_dseg.nii.gz"],
    )
    with pytest.raises(FieldError, match=r"has FLAIR, T1w; say which are the channels, like channels=\['FLAIR'\]"):
        find_scans(tmp_path)
    with pytest.raises(FieldError, match=r"has FLAIR, T1w, not 'PET'"):
        find_scans(tmp_path, channels=["PET"])
    with pytest.raises(FieldError, match=r"channels='T1w' must be a list of names, like \['T1w'\]"):
        find_scans(tmp_path, channels="T1w")
    touch(tmp_path, f"{two}_run-2_T1w.nii.gz")
    with pytest.raises(FieldError, match="are both T1w files of one scan; give open_volumes lists"):
        find_scans(tmp_path, channels=["T1w"])


def test_other_folders_are_named(tmp_path):
    with pytest.raises(FieldError, match=r"neither as nnU-Net \(imagesTr/\) nor as BIDS \(sub-\*/\): no such folder"):
        find_scans(tmp_path / "none")
    touch(tmp_path, "scan.nii")
    with pytest.raises(FieldError, match=r"nor as BIDS \(sub-\*/\): scan.nii; give open_volumes lists of paths"):
        find_scans(tmp_path)
    (tmp_path / "imagesTr").mkdir()
    with pytest.raises(FieldError, match=r"imagesTr has no .nii or .nii.gz file that is a scan"):
        find_scans(tmp_path)


def test_two_files_of_one_case(tmp_path):
    root = touch(tmp_path, "imagesTr/a_0000.nii.gz", "imagesTr/a_0000.nii", "labelsTr/a.nii.gz")
    with pytest.raises(FieldError, match=r"a_0000\.nii\.gz and .*a_0000\.nii are both files"):
        find_scans(root)
