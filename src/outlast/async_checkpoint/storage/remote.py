"""Checkpoints on any storage that fsspec can write to: S3, other object stores, SFTP, HDFS, ...

An object store has no rename. So a save is written in place, into a directory of its own
(`step-00000042-<save id>`), and its manifest is uploaded last: that one upload is the commit, and a
directory without a manifest is not a checkpoint. A save of a step that exists does not touch the
older checkpoint. The next commit removes that one: as long as it is not known whether the newer one
is committed, because the store does not answer, the older one must still be there.

Two things differ from a file system:

- *The lock is advisory.* See `remote_lock.py`. Two jobs never write into the same directory, but a
  job that opens the storage removes what looks like an abandoned save.
- *Incomplete multipart uploads* of a killed writer are invisible, but cost money. Removing a save
  ends them. Not every store lists them (MinIO does not), so a bucket should have a rule that ends
  incomplete uploads after a few days.

Credentials and endpoints are those of fsspec's file system for the URL: for S3 the usual
environment variables (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...), files and instance roles.
"""

from __future__ import annotations

import logging
import re
import uuid
from contextlib import suppress
from typing import Any

from outlast.async_checkpoint.storage.fence import stale
from outlast.async_checkpoint.storage.manifest import MANIFEST
from outlast.async_checkpoint.storage.protocol import (
    IDENTITY,
    FileWriter,
    Position,
    Storage,
    check_names,
    identity_in,
    step_of,
)
from outlast.async_checkpoint.storage.remote_files import (
    OrderedUpload,
    PartsUpload,
    RangeReader,
    as_os_errors,
    unfinished_uploads,
)
from outlast.async_checkpoint.storage.remote_lock import RemoteLock

log = logging.getLogger("outlast.checkpoint")

_CLOSING_S = 5.0
_PASSWORD = re.compile(r"(?<=://)[^/@]*@")
_WILDCARDS = re.compile(r"[*?\[\]]")


class RemoteStorage(Storage):
    """See `Storage`. Below one URL of fsspec, such as `s3://bucket/directory`; the bucket exists. A
    `ModuleNotFoundError` if a package is missing; says what to install. A `ValueError` if the kind
    of URL is unknown, or it contains a wildcard.
    """

    is_cached = False

    def __init__(self, url: str) -> None:
        self.where = _PASSWORD.sub("***@", url.rstrip("/"))
        if _WILDCARDS.search(url):
            raise ValueError(
                f"{self.where} has one of * ? [ ] in it, which fsspec takes for patterns"
            )
        self._fs, root = _connect(url, self.where)
        self._root = root.rstrip("/")
        # S3 takes the parts of an upload in any order; fsspec writes one after another.
        self._is_s3 = hasattr(self._fs, "call_s3")
        self._lock = RemoteLock(self._fs, self._root, self.where)

    def prepare(self) -> None:
        with as_os_errors(self.where):
            if not self._is_s3:
                self._fs.makedirs(self._root, exist_ok=True)
                return
            # fsspec's makedirs would create the bucket, in some region, and perhaps public.
            bucket, key, _ = self._fs.split_path(self._root)
            prefix = f"{key}/" if key else ""
            try:
                self._fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1)
            except FileNotFoundError:
                raise FileNotFoundError(f"{self.where}: there is no bucket {bucket!r}") from None

    def names_for(self, step: int, save_id: str) -> tuple[str, str]:
        name = f"step-{step:08d}-{save_id}"
        return name, name

    def folders(self) -> list[str]:
        entries: list[dict[str, Any]] = []
        with as_os_errors(self.where), suppress(FileNotFoundError):
            self._fs.invalidate_cache(self._root)
            entries = self._fs.ls(self._root, detail=True)
        paths = [str(entry["name"]) for entry in entries if entry["type"] == "directory"]
        found = {path.rstrip("/").rsplit("/", 1)[-1] for path in paths}
        if self._is_s3:
            uploads = unfinished_uploads(self._fs, self._root, self.where)
            found.update(folder for folder, _, _ in uploads)
        folders = sorted(found - {""})
        several = [f for each in self._by_step(folders).values() if len(each) > 1 for f in each]
        ages = {folder: self._committed_at(folder) for folder in several}  # seldom any
        return sorted(folders, key=lambda f: (step_of(f) or 0, ages.get(f, 0.0), f))

    def make(self, folder: str) -> None:
        path = self._inside(folder)
        if not self._is_s3:
            with as_os_errors(f"{self.where}/{folder}"):
                self._fs.makedirs(path, exist_ok=True)

    def create(self, folder: str, name: str, size_bytes: int) -> FileWriter:
        path, where = self._inside(folder, name), f"{self.where}/{folder}/{name}"
        kind = PartsUpload if self._is_s3 else OrderedUpload
        return kind(self._fs, path, size_bytes, where)

    def put(self, folder: str, name: str, content: bytes) -> None:
        path, where = self._inside(folder, name), f"{self.where}/{folder}/{name}"
        with as_os_errors(where):
            self._fs.pipe_file(path, content)

    def put_record(self, folder: str, name: str, content: bytes) -> None:
        self.make(folder)
        self.put(folder, name, content)

    def sync(self, folder: str) -> None:
        """Does nothing: an upload that has ended is durable."""

    def publish(self, working: str, final: str) -> str:
        """The upload of the manifest was the commit. Removes checkpoints that commits before this
        one replaced, but not the one that this commit replaced (see the module).
        """
        # The checkpoint is committed: an error here would deny that. What cannot be removed now
        # is removed by the next commit or the next job.
        with suppress(OSError):
            for folder in self._replaced(but=step_of(final)):
                self.remove(folder)
        return ""

    def settle(self) -> None:
        """Does nothing: what is visible is durable."""

    def open(self, folder: str, name: str) -> RangeReader:
        path, where = self._inside(folder, name), f"{self.where}/{folder}/{name}"
        return RangeReader(self._fs, path, where, self.size(folder, name))

    def size(self, folder: str, name: str) -> int:
        path, where = self._inside(folder, name), f"{self.where}/{folder}/{name}"
        with as_os_errors(where):
            found = self._fs.info(path)
            if found["type"] != "file":
                raise FileNotFoundError(f"{where} is not a file")
            return int(found["size"])

    def sizes(self, folder: str) -> dict[str, int]:
        path = self._inside(folder)
        found: list[dict[str, Any]] = []
        with as_os_errors(f"{self.where}/{folder}"), suppress(FileNotFoundError):
            self._fs.invalidate_cache(path)
            found = self._fs.ls(path, detail=True)
        files = [e for e in found if e["type"] == "file" and not str(e["name"]).endswith("/")]
        return {str(e["name"]).rsplit("/", 1)[-1]: int(e["size"]) for e in files}

    def saved_at(self, folder: str) -> float | None:
        return self._committed_at(folder) or None

    def hide(self, folder: str) -> str:
        path = self._inside(folder)
        with as_os_errors(f"{self.where}/{folder}"), suppress(FileNotFoundError):
            self._fs.rm_file(f"{path}/{MANIFEST}")
        return folder  # no other save ever has this name

    def remove(self, folder: str) -> None:
        path = self._inside(folder)
        self.hide(folder)  # no longer a checkpoint, even if the rest fails
        with as_os_errors(f"{self.where}/{folder}"):
            with suppress(FileNotFoundError):
                self._fs.rm(path, recursive=True)
            if self._is_s3:
                bucket = self._fs.split_path(path)[0]
                uploads = unfinished_uploads(self._fs, self._root, self.where, folder)
                for _, key, upload in uploads:
                    with suppress(FileNotFoundError):  # it has just ended
                        self._fs.call_s3(
                            "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload
                        )
            with suppress(FileNotFoundError):
                left = self._fs.find(path)  # a store may not report what it did not remove
                if left:
                    raise OSError(f"{self.where}/{folder}: {len(left)} files cannot be removed")

    def recycle(self, folder: str) -> None:
        self.remove(folder)

    def tidy(self) -> None:
        pass

    def identity(self, *, create: bool = True) -> str:
        with as_os_errors(f"{self.where}/{IDENTITY}"):
            path = self._inside(IDENTITY)
            with suppress(FileNotFoundError):
                found = identity_in(bytes(self._fs.cat_file(path)))
                if found or not create:
                    return found
                log.warning("%s/%s is damaged: it gets a new id", self.where, IDENTITY)
            if not create:
                return ""
            new = uuid.uuid4().hex
            self._fs.pipe_file(path, new.encode())
        return new

    def lock(self, owner: str, *, careful: bool = False, position: Position | None = None) -> None:
        self._lock.acquire(owner, careful, position)

    def unlock(self) -> None:
        self._lock.release()

    def close(self) -> None:
        self.unlock()
        client = getattr(self._fs, "_s3", None)
        if client is not None:
            from fsspec.asyn import sync

            # The garbage collector would close it within a tenth of a second, or never.
            with suppress(OSError), as_os_errors(self.where):
                sync(self._fs.loop, client.close, timeout=_CLOSING_S)

    def _inside(self, *names: str) -> str:
        check_names(names, self.where, "/*?[]")  # fsspec takes some for patterns
        return "/".join((self._root, *names))

    def _by_step(self, folders: list[str]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for folder in folders:
            step = step_of(folder)
            if step is not None:
                found.setdefault(step, []).append(folder)
        return found

    def _committed_at(self, folder: str) -> float:
        """By the store's clock, in seconds; 0.0 if not committed, or the store does not say."""
        try:
            with as_os_errors(f"{self.where}/{folder}"):
                return float(self._fs.modified(f"{self._root}/{folder}/{MANIFEST}").timestamp())
        except (FileNotFoundError, NotImplementedError):
            return 0.0

    def _replaced(self, but: int | None) -> list[str]:
        """The checkpoints of a step that has a later one, except those of step `but`."""
        found: list[str] = []
        wrong = stale(self)  # such a checkpoint replaces none
        there = [folder for folder in self.folders() if folder not in wrong]
        for step, several in self._by_step(there).items():
            if step != but and len(several) > 1:
                found += [folder for folder in several if self._committed_at(folder)][:-1]
        return found


def _connect(url: str, where: str) -> tuple[Any, str]:
    """The file system of `url`, without caches, and the path in it."""
    kind = url.split("://")[0].split("::")[0]
    extra = "s3" if kind in ("s3", "s3a") else "remote"
    try:
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(url, skip_instance_cache=True)
    except ImportError as e:
        also = "" if extra == "s3" else ", and what fsspec needs for this kind of URL"
        raise ModuleNotFoundError(
            f"{where}: {e}; to save there, pip install 'outlast[{extra}]'{also}"
        ) from e
    if hasattr(fs, "dircache"):
        fs.dircache.use_listings_cache = False  # other processes write there too
    return fs, root
