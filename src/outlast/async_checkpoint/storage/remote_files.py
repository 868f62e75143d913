"""Files on remote storage: reads, and uploads whose pieces arrive in any order from threads.

`PartsUpload` is for S3, which takes the parts of an upload in any order: each piece is a part, sent
by the thread that has it. `OrderedUpload` is for every other file system of fsspec: one thread at a
time writes the next piece, and early pieces wait where they are, in the snapshot. So neither keeps
more in memory than what is being sent: about two pieces per thread.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import sys
import threading
from collections.abc import Iterator
from typing import Any

from outlast.system.error_text import describe

_MOST_PARTS = 10_000  # the limit of S3


@contextlib.contextmanager
def as_os_errors(where: str) -> Iterator[None]:
    """Turns errors of fsspec and the libraries below it into an `OSError` that names `where`."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as e:
        if isinstance(e, OSError) and where in str(e):
            raise
        # botocore, aiohttp and others have their own exception trees and constructors.
        kinds = (FileNotFoundError, PermissionError)
        kind = next((kind for kind in kinds if isinstance(e, kind)), OSError)
        number = getattr(e, "errno", None)
        cause = str(e) if isinstance(e, OSError) else describe(e)
        text = f"{where}: {getattr(e, 'strerror', None) or cause}"
        raise (kind(number, text) if isinstance(number, int) else kind(text)) from e


class _Upload(abc.ABC):
    """A file being uploaded; `path`, in the file system, begins with the bucket on S3."""

    def __init__(self, fs: Any, path: str, size_bytes: int, where: str) -> None:
        self._fs, self._path = fs, path
        self._size = size_bytes
        self._where = where
        self._lock = threading.Lock()

    def finish(self) -> None:
        try:
            self._complete()
        except BaseException:
            self.abandon()
            raise

    @abc.abstractmethod
    def _complete(self) -> None: ...

    @abc.abstractmethod
    def abandon(self) -> None: ...


class PartsUpload(_Upload):
    """A file on S3: one request for a file of one piece, else a multipart upload."""

    def __init__(self, fs: Any, path: str, size_bytes: int, where: str) -> None:
        super().__init__(fs, path, size_bytes, where)
        bucket, key, _ = fs.split_path(path)
        self._target = {"Bucket": bucket, "Key": key}
        self._upload = ""
        self._piece_bytes = 0
        self._last: tuple[int, memoryview] | None = None
        self._parts: dict[int, dict[str, Any]] = {}
        self._sent_bytes = 0
        self._whole = False

    def write_at(self, offset: int, data: memoryview) -> None:
        if offset == 0 and len(data) == self._size:
            self._put(bytes(data))
            return
        with self._lock:
            if not self._upload:
                self._upload = str(self._call("create_multipart_upload")["UploadId"])
            if not self._piece_bytes:
                if offset + len(data) == self._size:
                    # The last piece came first: its number is not known yet.
                    self._last = (offset, data)
                    return
                self._piece_bytes = len(data)
        self._send(offset, data)

    def _complete(self) -> None:
        if self._size == 0:
            self._put(b"")
        if self._whole:
            return
        if self._last is not None and self._piece_bytes:
            self._send(*self._last)
        if self._sent_bytes != self._size:
            raise OSError(f"{self._where}: {self._sent_bytes} of {self._size} bytes were sent")
        parts = {"Parts": [self._parts[number] for number in sorted(self._parts)]}
        self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload=parts)
        self._upload = ""

    def abandon(self) -> None:
        """See `FileWriter`. What stays, with the store out of reach, goes with the directory."""
        upload, self._upload = self._upload, ""
        with contextlib.suppress(OSError):
            if upload:
                self._call("abort_multipart_upload", UploadId=upload)
            if self._whole:
                self._call("delete_object")

    def _put(self, content: bytes) -> None:
        with as_os_errors(self._where):
            self._whole = True  # even if the request fails: the object may exist
            self._fs.pipe_file(self._path, content)

    def _send(self, offset: int, data: memoryview) -> None:
        number, rest = divmod(offset, self._piece_bytes)
        if rest or number >= _MOST_PARTS:
            raise OSError(
                errno.EFBIG,
                f"{self._where}: no part begins at byte {offset}; S3 takes {_MOST_PARTS} parts, "
                f"of {self._piece_bytes} bytes here",
            )
        answer = self._call(
            "upload_part", UploadId=self._upload, PartNumber=number + 1, Body=bytes(data)
        )
        # S3 asks for the checksums of the parts, if they have any, at the end.
        part = {k: v for k, v in answer.items() if k == "ETag" or k.startswith("Checksum")}
        part.pop("ChecksumType", None)
        with self._lock:
            self._parts[number + 1] = {**part, "PartNumber": number + 1}
            self._sent_bytes += len(data)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        with as_os_errors(self._where):
            answer: dict[str, Any] = self._fs.call_s3(method, **self._target, **arguments)
            return answer


class OrderedUpload(_Upload):
    """A file that is written from beginning to end."""

    def __init__(self, fs: Any, path: str, size_bytes: int, where: str) -> None:
        super().__init__(fs, path, size_bytes, where)
        self._early: dict[int, memoryview] = {}
        self._at = 0
        self._busy = False
        self._file: Any = None

    def write_at(self, offset: int, data: memoryview) -> None:
        with self._lock:
            self._early[offset] = data
            if self._busy:
                return  # the writing thread takes this piece too
            self._busy = True
        while True:
            with self._lock:
                piece = self._early.pop(self._at, None)
                if piece is None:
                    self._busy = False
                    return
            with as_os_errors(self._where):
                if self._file is None:
                    self._file = self._fs.open(self._path, "wb")
                self._file.write(piece)
            self._at += len(piece)

    def _complete(self) -> None:
        if self._at != self._size:
            raise OSError(f"{self._where}: {self._at} of {self._size} bytes were sent")
        with as_os_errors(self._where):
            if self._file is None:
                self._fs.pipe_file(self._path, b"")
            else:
                self._file.close()
        self._file = None

    def abandon(self) -> None:
        """See `FileWriter`. Removes what the file system cannot discard."""
        file, self._file = self._file, None
        self._early.clear()
        if file is None:
            return
        with contextlib.suppress(OSError), as_os_errors(self._where):
            from fsspec.spec import AbstractBufferedFile

            if isinstance(file, AbstractBufferedFile):
                file.discard()
                file.closed = True  # otherwise its destructor would finish the upload
            else:
                file.close()
        with contextlib.suppress(OSError), as_os_errors(self._where):
            self._fs.rm_file(self._path)


class RangeReader:
    """A file read by several threads, in ranges. The arguments are those of the uploads."""

    at_once = sys.maxsize  # each read is a request

    def __init__(self, fs: Any, path: str, where: str, size_bytes: int) -> None:
        self._fs, self._path, self._where, self.size_bytes = fs, path, where, size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        end = min(offset + len(buffer), self.size_bytes)
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


def unfinished_uploads(
    fs: Any, root: str, where: str, folder: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Directory, key and id of the unfinished multipart uploads in `root`, or one folder of it."""
    bucket, key, _ = fs.split_path(root)
    within = f"{key}/" if key else ""
    after: dict[str, str] = {}
    while True:
        prefix = f"{within}{folder}/" if folder else within
        try:
            with as_os_errors(where):
                page = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **after)
        except OSError:
            return  # not permitted or not supported: then the bucket has a rule for them
        for upload in page.get("Uploads", []):
            parts = upload["Key"].removeprefix(within).split("/")
            if len(parts) == 2:
                yield parts[0], upload["Key"], upload["UploadId"]
        if not page.get("IsTruncated"):
            return
        after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
