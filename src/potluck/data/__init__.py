"""Data that does not fit into memory: data sets that are stored in shards, and read by them."""

from potluck.data.columns import ArrowFiles, ParquetFiles
from potluck.data.numpy_files import NumpyFiles
from potluck.data.shards import ShardedDataset
from potluck.data.shared import SharedFolder, shared
from potluck.data.webdataset import WebDatasetFiles

__all__ = [
    "ArrowFiles",
    "NumpyFiles",
    "ParquetFiles",
    "ShardedDataset",
    "SharedFolder",
    "WebDatasetFiles",
    "shared",
]
