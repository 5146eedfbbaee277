"""Reading: stores of any format as samples that are cut while they are read. Writing: tiles, each rank its own."""

from jigsaw.errors import (
    CacheError,
    CorruptChunkError,
    FetchError,
    FieldError,
    ForkedError,
    GridError,
    HaloError,
    MissingArrayError,
    MissingLevelError,
    NaNError,
    PeerError,
    ReadError,
    StateError,
    TruncatedError,
    UnsupportedStoreError,
    WindowError,
    WriteError,
)
from jigsaw.fields.regridder import Regridder, regrid
from jigsaw.fields.sliding import sliding_window
from jigsaw.io.conversion.convert import Converted, convert, verify
from jigsaw.io.datasets.dataset import Dataset, Sample
from jigsaw.io.datasets.loader import Batch, DataLoader
from jigsaw.io.datasets.opening import open
from jigsaw.io.datasets.pairs import pair
from jigsaw.io.datasets.splits import split
from jigsaw.io.formats.array_source import ArraySource, SourceArray
from jigsaw.io.formats.disk_cache import DiskCache
from jigsaw.io.formats.many_files import open_many
from jigsaw.io.formats.raw import open_npy, open_raw
from jigsaw.io.formats.store import open_hdf5, open_store
from jigsaw.io.reports.recommend import Recommendation, recommend
from jigsaw.io.series import forcings
from jigsaw.io.series.cell_grid import CellGrid
from jigsaw.io.series.statistics import Statistics
from jigsaw.io.stats.compute import statistics
from jigsaw.io.volumes import augment
from jigsaw.io.volumes.crops import Foreground
from jigsaw.io.volumes.foreground_box import ForegroundBox
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.scan_folders import FoundScans, find_scans
from jigsaw.io.volumes.volume_dataset import Volumes, VolumeSample
from jigsaw.io.volumes.volume_loader import VolumeBatch, VolumeLoader
from jigsaw.io.volumes.volume_statistics import volume_statistics
from jigsaw.io.volumes.volume_writer import write_volume
from jigsaw.io.writing.write import Writer, completeness, write

__all__ = [
    "ArraySource",
    "Batch",
    "CacheError",
    "CellGrid",
    "Converted",
    "CorruptChunkError",
    "DataLoader",
    "Dataset",
    "DiskCache",
    "FetchError",
    "FieldError",
    "Foreground",
    "ForegroundBox",
    "ForkedError",
    "FoundScans",
    "GridError",
    "HaloError",
    "MissingArrayError",
    "MissingLevelError",
    "NaNError",
    "PeerError",
    "ReadError",
    "Recommendation",
    "Regridder",
    "Sample",
    "SourceArray",
    "StateError",
    "Statistics",
    "TruncatedError",
    "UnsupportedStoreError",
    "VolumeBatch",
    "VolumeLoader",
    "VolumeSample",
    "Volumes",
    "WindowError",
    "WriteError",
    "Writer",
    "augment",
    "completeness",
    "convert",
    "find_scans",
    "forcings",
    "open",
    "open_hdf5",
    "open_many",
    "open_npy",
    "open_raw",
    "open_store",
    "open_volumes",
    "pair",
    "recommend",
    "regrid",
    "sliding_window",
    "split",
    "statistics",
    "verify",
    "volume_statistics",
    "write",
    "write_volume",
]
