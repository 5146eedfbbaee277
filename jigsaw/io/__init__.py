"""Reading: stores of any format as samples that are cut while they are read."""

from jigsaw.io.dataset import Dataset, Sample
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
)
from jigsaw.io.loader import Batch, DataLoader
from jigsaw.io.opening import open
from jigsaw.io.store import open_store

__all__ = [
    "Batch",
    "CorruptChunkError",
    "DataLoader",
    "Dataset",
    "FieldError",
    "GridError",
    "HaloError",
    "MissingArrayError",
    "MissingLevelError",
    "NaNError",
    "PeerError",
    "ReadError",
    "Sample",
    "StateError",
    "TruncatedError",
    "UnsupportedStoreError",
    "WindowError",
    "open",
    "open_store",
]
