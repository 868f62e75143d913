"""Checkpoints wherever fsspec can write: S3 above all, other object stores, SFTP, HDFS, ...

An object store has no rename. So a save is written in place, into a folder of its own
(`step-00000042-<save id>`), and its manifest is uploaded last: that one upload is the commit, and
a folder without a manifest is no checkpoint. A save of a step that is there already does not touch
the older one. That one is removed by the commit after, when it is known that this one was not in
vain: had the writer been killed between its commit and its answer, the save counts as failed and
is removed, and the older one must still be there.

What is not as on a file system:

- *No lock.* An object, `.owner`, names the job that saves here. A job whose process is alive on
  this very machine keeps others out; of one on another machine nobody here can know, so it is
  named in a warning, and the folder is taken over. No two jobs ever write into the same folder of
  a save, but one that opens the folder removes what looks like a save that was given up.
- *Parts of uploads* that a killed writer has begun are paid for, and seen by nobody. Removing a
  save ends them. Not every store lists them (MinIO does not), so a bucket should have a rule that
  ends incomplete uploads after a few days.

Credentials and endpoints come from where the file system of the URL takes them: for S3 the usual
environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...), files and instance roles.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from outlast.async_checkpoint.storage.manifest import MANIFEST
from outlast.async_checkpoint.storage.protocol import IDENTITY, FileWriter, step_of
from outlast.async_checkpoint.storage.upload import OrderedUpload, PartsUpload, as_os_errors
from outlast.errors import CheckpointError

__all__ = ["OWNER", "RemoteStorage"]

log = logging.getLogger("outlast.checkpoint")

OWNER = ".owner"
_CLOSING_S = 5.0
_PASSWORD = re.compile(r"(?<=://)[^/@]*@")
_WILDCARDS = re.compile(r"[*?\[\]]")


class RemoteStorage:
    """Checkpoints below one URL. See `Storage`.

    Args:
        url: `s3://bucket/folder`, or another that fsspec takes. The bucket must be there.

    Raises:
        ModuleNotFoundError: saying what to install.
        ValueError: for a URL of an unknown kind, or one that would be taken for a pattern.
    """

    def __init__(self, url: str) -> None:
        self.where = _PASSWORD.sub("***@", url.rstrip("/"))
        if _WILDCARDS.search(url):
            raise ValueError(
                f"{self.where} has one of * ? [ ] in it, which fsspec takes for patterns"
            )
        self._fs, root = _connect(url, self.where)
        self._root = root.rstrip("/")
        # S3 takes the parts of an upload in any order; fsspec's own way is one after another.
        self._is_s3 = hasattr(self._fs, "call_s3")
        self._token = ""

    def prepare(self) -> None:
        with as_os_errors(self.where):
            if not self._is_s3:
                self._fs.makedirs(self._root, exist_ok=True)
                return
            # fsspec's own makedirs would make the bucket, in some region, for anybody to see.
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
        """See `Storage`. Of two that are committed for one step, the later one comes later."""
        found = {_name(entry) for entry in self._entries() if entry["type"] == "directory"}
        found.update(folder for folder, _, _ in self._uploads())
        return self._by_age(sorted(found - {""}))

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
        path = self._inside(folder, name)
        with as_os_errors(f"{self.where}/{folder}/{name}"):
            self._fs.pipe_file(path, content)

    def sync(self, folder: str) -> None:
        """Nothing is to do: an upload has ended when it is durable."""

    def publish(self, working: str, final: str) -> None:
        """The manifest has been uploaded, so it is done. Removes what commits before this one have
        replaced, though not what this one has (see the module).
        """
        # The checkpoint is there: an error now would say that it is not. What stays is removed by
        # the next commit, or by the next job.
        with suppress(OSError):
            for folder in self._replaced(but=step_of(final)):
                self.remove(folder)

    def get(self, folder: str, name: str) -> bytes:
        path = self._inside(folder, name)
        with as_os_errors(f"{self.where}/{folder}/{name}"):
            return bytes(self._fs.cat_file(path))

    def open(self, folder: str, name: str) -> _Reader:
        where = f"{self.where}/{folder}/{name}"
        return _Reader(self._fs, self._inside(folder, name), where, self.size(folder, name))

    def size(self, folder: str, name: str) -> int:
        path = self._inside(folder, name)
        with as_os_errors(f"{self.where}/{folder}/{name}"):
            found = self._fs.info(path)
            if found["type"] != "file":
                raise FileNotFoundError(f"{self.where}/{folder}/{name} is no file")
            return int(found["size"])

    def hide(self, folder: str) -> str:
        path = self._inside(folder)
        with as_os_errors(f"{self.where}/{folder}"), suppress(FileNotFoundError):
            self._fs.rm_file(f"{path}/{MANIFEST}")
        return folder  # no other save ever has this name

    def remove(self, folder: str) -> None:
        path = self._inside(folder)
        self.hide(folder)  # from here on it is no checkpoint, however far the rest comes
        with as_os_errors(f"{self.where}/{folder}"):
            with suppress(FileNotFoundError):
                self._fs.rm(path, recursive=True)
            for _, key, upload in self._uploads(folder):
                with suppress(FileNotFoundError):  # it has just ended
                    bucket = self._fs.split_path(path)[0]
                    self._fs.call_s3(
                        "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload
                    )
            with suppress(FileNotFoundError):
                left = self._fs.find(path)  # a store may say nothing of what it did not remove
                if left:
                    raise OSError(f"{self.where}/{folder}: {len(left)} files cannot be removed")

    def recycle(self, folder: str) -> None:
        self.remove(folder)

    def tidy(self) -> None:
        pass

    # ------------------------------------------------------------------------------- owner

    def identity(self) -> str:
        found = self._read(IDENTITY)
        if found is None:
            found = uuid.uuid4().hex.encode()
            with as_os_errors(f"{self.where}/{IDENTITY}"):
                self._fs.pipe_file(self._inside(IDENTITY), found)
        return found.decode(errors="replace")

    def lock(self, owner: str, *, careful: bool = False) -> None:
        """Says who saves here. See `Storage`, and the module for what it is worth."""
        path = self._inside(OWNER)
        other = self._owner()
        if other is not None:
            alive = _alive(other)
            named = str(other.get("owner") or "which left no name")
            if alive or (alive is None and careful):
                doubt = "" if alive else ", as far as one can know from here"
                raise CheckpointError(
                    f"{self.where} is in use by another job ({named}){doubt}; two jobs that save "
                    "into one folder would remove each other's checkpoints"
                )
            if alive is None:
                log.warning(
                    "%s was last used by another job (%s), on another machine, which did not say "
                    "that it had ended: taken over, in the belief that it is dead",
                    self.where,
                    named,
                )
        self._token = uuid.uuid4().hex
        with as_os_errors(f"{self.where}/{OWNER}"):
            said = {"owner": owner, "token": self._token, **_here()}
            self._fs.pipe_file(path, json.dumps(said).encode())
        other = self._owner()
        if other is None or other.get("token") != self._token:
            named = str((other or {}).get("owner") or "which left no name")
            self._token = ""
            raise CheckpointError(f"{self.where} was taken by another job ({named}) just now")

    def unlock(self) -> None:
        token, self._token = self._token, ""
        # What cannot be taken away names a process that will be dead.
        with suppress(OSError):
            if token and (self._owner() or {}).get("token") == token:
                with as_os_errors(f"{self.where}/{OWNER}"):
                    self._fs.rm_file(self._inside(OWNER))

    def close(self) -> None:
        self.unlock()
        client = getattr(self._fs, "_s3", None)
        if client is not None:
            from fsspec.asyn import sync

            # Left to the garbage collector, it is closed within a tenth of a second, or not.
            with suppress(OSError), as_os_errors(self.where):
                sync(self._fs.loop, client.close, timeout=_CLOSING_S)

    def _owner(self) -> dict[str, Any] | None:
        content = self._read(OWNER)
        if content is None:
            return None
        with suppress(ValueError):
            found = json.loads(content)
            if isinstance(found, dict):
                return found
        return {}

    # ------------------------------------------------------------------------------ within

    def _read(self, name: str) -> bytes | None:
        """A file beside the folders; `None` if it is not there."""
        with as_os_errors(f"{self.where}/{name}"):
            try:
                return bytes(self._fs.cat_file(self._inside(name)))
            except FileNotFoundError:
                return None

    def _inside(self, *names: str) -> str:
        for name in names:
            if not name or "/" in name or name in (".", "..") or _WILDCARDS.search(name):
                raise CheckpointError(f"{name!r} is no name of a file in {self.where}")
        return "/".join((self._root, *names))

    def _entries(self) -> list[dict[str, Any]]:
        with as_os_errors(self.where):
            self._fs.invalidate_cache(self._root)
            try:
                return list(self._fs.ls(self._root, detail=True))
            except FileNotFoundError:
                return []

    def _uploads(self, folder: str = "") -> Iterator[tuple[str, str, str]]:
        """Folder, key and id of the uploads that have begun and not ended."""
        if not self._is_s3:
            return
        bucket, key, _ = self._fs.split_path(self._root)
        within = f"{key}/" if key else ""
        after: dict[str, str] = {}
        while True:
            prefix = f"{within}{folder}/" if folder else within
            try:
                with as_os_errors(self.where):
                    page = self._fs.call_s3(
                        "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **after
                    )
            except OSError:
                return  # not allowed, or not known there: then the bucket has a rule for them
            for upload in page.get("Uploads", []):
                parts = upload["Key"].removeprefix(within).split("/")
                if len(parts) == 2:
                    yield parts[0], upload["Key"], upload["UploadId"]
            if not page.get("IsTruncated"):
                return
            after = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def _by_age(self, folders: list[str]) -> list[str]:
        """The same, with those committed for one step in the order of their commits."""
        ages = {
            folder: self._committed_at(folder)
            for several in _by_step(folders).values()
            if len(several) > 1  # which is rare, and the store need not be asked of others
            for folder in several
        }
        return sorted(folders, key=lambda f: (step_of(f) or 0, ages.get(f, 0.0), f))

    def _committed_at(self, folder: str) -> float:
        """By the store's own clock, in seconds; 0.0 if it never was, or the store does not say."""
        try:
            with as_os_errors(f"{self.where}/{folder}"):
                return float(self._fs.modified(f"{self._root}/{folder}/{MANIFEST}").timestamp())
        except (FileNotFoundError, NotImplementedError):
            return 0.0

    def _replaced(self, but: int | None) -> list[str]:
        """Those committed for a step that has a later one. Not of step `but`."""
        found: list[str] = []
        for step, several in _by_step(self.folders()).items():
            if step != but and len(several) > 1:
                found += [folder for folder in several if self._committed_at(folder)][:-1]
        return found


class _Reader:
    """A file that several threads read, in ranges."""

    at_once = sys.maxsize  # each read is a request

    def __init__(self, fs: Any, path: str, where: str, size_bytes: int) -> None:
        self._fs = fs
        self._path = path
        self._where = where
        self._size = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        end = min(offset + len(buffer), self._size)
        if offset >= end:
            return 0
        with as_os_errors(self._where):
            content = self._fs.cat_file(self._path, start=offset, end=end)
        if len(content) > end - offset:
            raise OSError(f"{self._where}: the store sent more than it was asked for")
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        pass


def _connect(url: str, where: str) -> tuple[Any, str]:
    """The file system of `url`, of which nothing is cached, and the path in it."""
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


def _by_step(folders: list[str]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for folder in folders:
        step = step_of(folder)
        if step is not None:
            found.setdefault(step, []).append(folder)
    return found


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]


def _here() -> dict[str, Any]:
    """What tells whether a process can be seen from here, and this process."""
    return {
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pids": os.readlink("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "began": psutil.Process().create_time(),
    }


def _alive(owner: dict[str, Any]) -> bool | None:
    """Whether the process is; `None` where it cannot be known."""
    here = _here()
    if any(owner.get(key) != here[key] for key in ("host", "boot", "pids")):
        return None
    try:
        began = psutil.Process(int(owner["pid"])).create_time()
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
    return bool(abs(began - float(owner.get("began", -1))) < 1.0)  # a number is used again
