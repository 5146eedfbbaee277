"""Reading: stores of any format as samples that are cut while they are read.  Writing: tiles, each rank its own."""

from jigsaw.io import forcings
from jigsaw.io._array_source import ArraySource, SourceArray
from jigsaw.io._many import open_many
from jigsaw.io._raw import open_npy, open_raw
from jigsaw.io.dataset import Dataset, Sample
from jigsaw.io.disk_cache import DiskCache
from jigsaw.io.errors import (
    CorruptChunkError,
    FieldError,
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
from jigsaw.io.foreground import Foreground
from jigsaw.io.loader import Batch, DataLoader
from jigsaw.io.opening import open
from jigsaw.io.regrid import Regridder, regrid
from jigsaw.io.sliding import sliding_window
from jigsaw.io.splits import split
from jigsaw.io.stats_run import statistics
from jigsaw.io.stats_table import Statistics
from jigsaw.io.store import open_hdf5, open_store
from jigsaw.io.volume_loader import VolumeBatch, VolumeLoader
from jigsaw.io.volume_opening import open_volumes
from jigsaw.io.volumes import Volumes, VolumeSample
from jigsaw.io.write import Writer, completeness, write

__all__ = [
    "ArraySource",
    "Batch",
    "CorruptChunkError",
    "DataLoader",
    "Dataset",
    "DiskCache",
    "FieldError",
    "Foreground",
    "GridError",
    "HaloError",
    "MissingArrayError",
    "MissingLevelError",
    "NaNError",
    "PeerError",
    "ReadError",
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
    "forcings",
    "open",
    "open_hdf5",
    "open_many",
    "open_npy",
    "open_raw",
    "open_store",
    "open_volumes",
    "regrid",
    "sliding_window",
    "split",
    "statistics",
    "write",
]
