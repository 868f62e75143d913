"""Opens the storage that a path or a URL names."""

from __future__ import annotations

from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.protocol import STEP, Storage


def open_storage(url: str, prefix: str = STEP) -> Storage:
    """Returns the storage at `url`: a path, `file://` and a path, or any URL that fsspec supports.
    `prefix` is that of the checkpoints in it.

    Raises:
        ModuleNotFoundError: if fsspec, or its implementation for this URL, is missing; names it.
        ValueError: if the kind of URL is unknown.
    """
    path = url.removeprefix("file://")
    if "://" not in path:
        return LocalStorage(path, prefix)
    # fsspec is an optional dependency.
    from outlast.async_checkpoint.storage.remote import RemoteStorage

    return RemoteStorage(url, prefix)
