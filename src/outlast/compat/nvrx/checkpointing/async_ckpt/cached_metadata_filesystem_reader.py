"""`CachedMetadataFileSystemReader`: reads the metadata of a checkpoint once."""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["CachedMetadataFileSystemReader"]


class CachedMetadataFileSystemReader(FileSystemReader):
    """`torch.distributed.checkpoint.FileSystemReader`; `read_metadata` reads the file once."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata
