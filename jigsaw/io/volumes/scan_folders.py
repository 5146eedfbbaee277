"""`find_scans`: the images and label maps of a folder as nnU-Net, the Decathlon and BIDS lay it out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jigsaw.errors import FieldError

_SCAN_ENDINGS = (".nii.gz", ".nii")
_BIDS_LABEL_SUFFIX = "dseg"


class FoundScans(NamedTuple):
    """Paths of the channels of each scan, None for one that it lacks, and its label map or None; `labels` is None where
    no scan has one.

    >>> found = jigsaw.io.FoundScans([["a_0000.nii.gz", "a_0001.nii.gz"]], None)
    >>> len(found.images[0])
    2
    """

    images: list[list[str | None]]
    labels: list[str | None] | None


def find_scans(
    folder: str | os.PathLike[str],
    channels: Sequence[str] | None = None,
    part: str = "Tr",
    allow_absent: bool = False,
) -> FoundScans:
    """Find the scans of a folder, by rising name: ``open_volumes(*find_scans("Dataset004_Hippocampus"), ...)``.

    - nnU-Net's and the Decathlon's: ``imagesTr/CASE_0000.nii.gz`` (a number a channel, or a file with all of them) and
      ``labelsTr/CASE.nii.gz``; `part` is ``"Tr"``, ``"Ts"`` or ``"Va"``; `channels` are names of ``dataset.json``;
    - BIDS: ``sub-01/[ses-1/]anat/sub-01_[...]T1w.nii.gz``, with label maps ``*_dseg.nii.gz`` of the same subject and
      session there or under ``derivatives``; `channels` are suffixes, like ``["T1w", "FLAIR"]``.

    Only names and ``dataset.json`` are read. With `allow_absent`, None stands for a channel that a scan lacks, which
    `open_volumes` takes with ``absent_fill=``. The channels of nnU-Net's folders are then those that ``dataset.json``
    names.

    Raises: `FieldError` for a folder of neither kind, and for channels that it lacks. Also for a scan that lacks a
    channel, unless that is allowed, or has several files or label maps of one kind.

    >>> import pathlib
    >>> for name in ("imagesTr/a_0000.nii.gz", "imagesTr/a_0001.nii.gz", "labelsTr/a.nii.gz"):
    ...     pathlib.Path("Dataset001", name).parent.mkdir(parents=True, exist_ok=True)
    ...     pathlib.Path("Dataset001", name).touch()
    >>> images, labels = jigsaw.io.find_scans("Dataset001")
    >>> [len(paths) for paths in images], labels
    ([2], ['Dataset001/labelsTr/a.nii.gz'])
    """
    root = Path(folder)
    if isinstance(channels, str):
        raise FieldError(f"channels={channels!r} must be a list of names, like [{channels!r}]")
    if (root / f"images{part}").is_dir():
        return _nnunet_scans(root, part, channels, allow_absent)
    if any(root.glob("sub-*/")):
        return _bids_scans(root, channels, allow_absent)
    names = ", ".join(sorted(p.name for p in root.iterdir())[:8]) if root.is_dir() else "no such folder"
    raise FieldError(
        f"{root} is laid out neither as nnU-Net (images{part}/) nor as BIDS (sub-*/): {names}; give open_volumes "
        "lists of paths instead"
    )


def _scans_in(folder: Path) -> dict[str, Path]:
    scans: dict[str, Path] = {}
    for ending in _SCAN_ENDINGS:
        for path in folder.glob(f"*{ending}"):
            _keep_only(scans, path.name.removesuffix(ending), path, "files")
    return dict(sorted(scans.items()))


def _told(scans: list[list[str | None]], labels: list[str | None], where: str) -> FoundScans:
    if not scans:
        raise FieldError(f"{where} has no .nii or .nii.gz file that is a scan")
    return FoundScans(scans, labels if any(labels) else None)


def _nnunet_scans(root: Path, part: str, channels: Sequence[str] | None, allow_absent: bool) -> FoundScans:
    files, maps = _scans_in(root / f"images{part}"), _scans_in(root / f"labels{part}")
    names = _channels_of_dataset(root)
    if allow_absent and not names:  # of a case that lacks its first channel, the number could be that of a case
        raise FieldError(
            f"allow_absent=True: {root / 'dataset.json'} names no channels, so nobody knows which a scan lacks; write "
            'it, like {"channel_names": {"0": "T1", "1": "FLAIR"}}, or give open_volumes lists of paths'
        )
    groups: dict[str, dict[str, Path]] = {}
    for name, path in files.items():
        case, _, number = name.rpartition("_")
        is_channel = bool(re.fullmatch(r"\d{4}", number))
        groups.setdefault(case if is_channel else name, {})[number if is_channel else "0000"] = path
    cases: dict[str, dict[str, Path]] = {}
    for case, paths in groups.items():
        # The Decathlon's names are like `la_0007`, and each is a scan: it has its own label map, or the numbers are not
        # those of channels.
        known = set(names) or {f"{k:04d}" for k in range(len(paths))}
        if set(paths) <= known and not any(f"{case}_{number}" in maps for number in paths):
            cases[case] = paths
        else:
            cases |= {f"{case}_{number}": {"0000": path} for number, path in paths.items()}
    wanted = _channel_numbers(root, names, channels, sorted({n for paths in cases.values() for n in paths}))
    scans = [[_channel_of(case, paths, n, allow_absent) for n in wanted] for case, paths in cases.items()]
    labels = [str(maps[case]) if case in maps else None for case in cases]
    return _told(scans, labels, f"{root / f'images{part}'}")


def _channels_of_dataset(root: Path) -> dict[str, str]:
    """Return the names of channels by number, as ``dataset.json`` has them, if that exists."""
    about = root / "dataset.json"
    try:
        facts: Any = json.loads(about.read_text()) if about.is_file() else {}
        named: Any = facts.get("channel_names", facts.get("modality", {}))
        return {f"{int(number):04d}": str(name) for number, name in named.items()}
    except (AttributeError, ValueError) as e:  # the file is not JSON, not a mapping, or has no numbers
        raise FieldError(
            f"{about} does not say which channels there are, as nnU-Net's and the Decathlon's do: {e}"
        ) from e


def _channel_numbers(
    root: Path, names: Mapping[str, str], channels: Sequence[str] | None, present: list[str]
) -> list[str]:
    if channels is None:
        return present
    numbers = {name: number for number, name in names.items() if number in present}
    unknown = [name for name in channels if name not in numbers]
    if unknown:
        about, known = root / "dataset.json", ", ".join(numbers) or "none"
        raise FieldError(f"channels={list(channels)}: {about} names {known}, not {unknown[0]!r}")
    return [numbers[name] for name in channels]


def _channel_of(case: str, paths: Mapping[str, Path], channel: str, allow_absent: bool) -> str | None:
    if channel not in paths:
        if allow_absent:
            return None
        raise FieldError(
            f"scan {case} has no channel {channel}; it has {', '.join(sorted(paths))}: name those that all have by "
            "channels=, leave the scan out, or allow_absent=True gives None for it"
        )
    return str(paths[channel])


def _bids_scans(root: Path, channels: Sequence[str] | None, allow_absent: bool) -> FoundScans:
    images: dict[str, dict[str, Path]] = {}
    labels: dict[str, Path] = {}
    derived = [*root.glob("derivatives/sub-*/"), *root.glob("derivatives/*/sub-*/")]
    for subject in (*root.glob("sub-*/"), *derived):
        for path in sorted(p for end in _SCAN_ENDINGS for p in subject.rglob(f"*{end}")):
            stem, _, suffix = path.name.split(".", 1)[0].rpartition("_")
            scan = "_".join(word for word in stem.split("_") if word.startswith(("sub-", "ses-")))
            if suffix == _BIDS_LABEL_SUFFIX:
                _keep_only(labels, scan, path, "label maps")
            elif subject not in derived:
                _keep_only(images.setdefault(scan, {}), suffix, path, f"{suffix} files")
    kinds = sorted({suffix for suffixes in images.values() for suffix in suffixes})
    if channels is None and len(kinds) > 1:
        raise FieldError(f"{root} has {', '.join(kinds)}; say which are the channels, like channels=[{kinds[0]!r}]")
    wanted = kinds if channels is None else list(channels)
    if unknown := [name for name in wanted if name not in kinds]:
        raise FieldError(f"channels={wanted}: {root} has {', '.join(kinds) or 'no scans'}, not {unknown[0]!r}")
    cases = sorted(scan for scan, suffixes in images.items() if any(name in suffixes for name in wanted))
    scans = [[_channel_of(scan, images[scan], name, allow_absent) for name in wanted] for scan in cases]
    return _told(scans, [str(labels[s]) if s in labels else None for s in cases], str(root))


def _keep_only(files: dict[str, Path], name: str, path: Path, what: str) -> None:
    if name in files:
        raise FieldError(
            f"{files[name]} and {path} are both {what} of one scan; give open_volumes lists of paths instead"
        )
    files[name] = path
