"""Reading: stores of any format as samples that are cut while they are read.  Writing: tiles, each rank its own."""

from jigsaw.io import forcings
from jigsaw.io.conversion.run import Converted, convert, verify
from jigsaw.io.dataset import Dataset, Sample
from jigsaw.io.errors import (
    CorruptChunkError,
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
from jigsaw.io.fetch.disk_cache import DiskCache
from jigsaw.io.formats.array_source import ArraySource, SourceArray
from jigsaw.io.formats.many_files import open_many
from jigsaw.io.formats.raw import open_npy, open_raw
from jigsaw.io.grids.regrid import Regridder, regrid
from jigsaw.io.loader import Batch, DataLoader
from jigsaw.io.opening import open
from jigsaw.io.reports.recommend import Recommendation, recommend
from jigsaw.io.splits import split
from jigsaw.io.stats.run import statistics
from jigsaw.io.stats.table import Statistics
from jigsaw.io.store import open_hdf5, open_store
from jigsaw.io.volumes.dataset import Volumes, VolumeSample
from jigsaw.io.volumes.foreground import Foreground
from jigsaw.io.volumes.loader import VolumeBatch, VolumeLoader
from jigsaw.io.volumes.opening import open_volumes
from jigsaw.io.volumes.sliding import sliding_window
from jigsaw.io.writing.write import Writer, completeness, write

__all__ = [
    "ArraySource",
    "Batch",
    "Converted",
    "CorruptChunkError",
    "DataLoader",
    "Dataset",
    "DiskCache",
    "FieldError",
    "Foreground",
    "ForkedError",
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
    "completeness",
    "convert",
    "forcings",
    "open",
    "open_hdf5",
    "open_many",
    "open_npy",
    "open_raw",
    "open_store",
    "open_volumes",
    "recommend",
    "regrid",
    "sliding_window",
    "split",
    "statistics",
    "verify",
    "write",
]
