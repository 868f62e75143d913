"""Uploads of large files, whose pieces come in any order from several threads.

`PartsUpload` is for S3, which takes the parts of an upload in any order: each piece is a part, sent
by the thread that has it. `OrderedUpload` is for everything else that fsspec writes to: one thread
at a time writes what is next, and pieces that come early wait where they are, in the snapshot. So
neither holds more in memory than what is being sent: about two pieces a thread.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["OrderedUpload", "PartsUpload", "as_os_errors"]

_MOST_PARTS = 10_000  # S3's own limit


@contextlib.contextmanager
def as_os_errors(where: str) -> Iterator[None]:
    """What fsspec and what is below it raise, as `OSError` that says where."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as e:
        if isinstance(e, OSError) and where in str(e):
            raise
        # botocore, aiohttp and the like have roots of their own, and constructors too.
        kinds = (FileNotFoundError, PermissionError)
        kind = next((kind for kind in kinds if isinstance(e, kind)), OSError)
        number = getattr(e, "errno", None)
        said = str(e) if isinstance(e, OSError) else f"{type(e).__name__}: {e}"
        text = f"{where}: {getattr(e, 'strerror', None) or said}"
        raise (kind(number, text) if isinstance(number, int) else kind(text)) from e


class PartsUpload:
    """A file on S3. A file of one piece is put at once; others are uploads of several parts.

    Args:
        fs: s3fs.
        path: with the bucket.
        size_bytes: of the whole file.
        where: what to call it.
    """

    def __init__(self, fs: Any, path: str, size_bytes: int, where: str) -> None:
        self._fs = fs
        self._path = path
        self._size = size_bytes
        self._where = where
        bucket, key, _ = fs.split_path(path)
        self._target = {"Bucket": bucket, "Key": key}
        self._lock = threading.Lock()
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
                    # The last piece, before any other: its number is not known yet.
                    self._last = (offset, data)
                    return
                self._piece_bytes = len(data)
        self._send(offset, data)

    def finish(self) -> None:
        try:
            if self._size == 0:
                self._put(b"")
            if self._whole:
                return
            if self._last is not None and self._piece_bytes:
                self._send(*self._last)
            if self._sent_bytes != self._size:
                raise OSError(f"{self._where}: {self._sent_bytes} of {self._size} bytes were sent")
            parts = [self._parts[number] for number in sorted(self._parts)]
            self._call(
                "complete_multipart_upload",
                UploadId=self._upload,
                MultipartUpload={"Parts": parts},
            )
            self._upload = ""
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """See `FileWriter`. Nothing stays behind, unless the store cannot be reached; then it is
        removed with the folder.
        """
        upload, self._upload = self._upload, ""
        with contextlib.suppress(OSError):
            if upload:
                self._call("abort_multipart_upload", UploadId=upload)
            if self._whole:
                self._call("delete_object")

    def _put(self, content: bytes) -> None:
        with as_os_errors(self._where):
            self._whole = True  # also if it seems to fail, it may be there
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
        # The checksums of the parts, if it has any, are asked for at the end.
        part = {k: v for k, v in answer.items() if k == "ETag" or k.startswith("Checksum")}
        part.pop("ChecksumType", None)
        with self._lock:
            self._parts[number + 1] = {**part, "PartNumber": number + 1}
            self._sent_bytes += len(data)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        with as_os_errors(self._where):
            answer: dict[str, Any] = self._fs.call_s3(method, **self._target, **arguments)
            return answer


class OrderedUpload:
    """A file that is written from its beginning to its end.

    Args:
        fs: of fsspec.
        path: in it.
        size_bytes: of the whole file.
        where: what to call it.
    """

    def __init__(self, fs: Any, path: str, size_bytes: int, where: str) -> None:
        self._fs = fs
        self._path = path
        self._size = size_bytes
        self._where = where
        self._lock = threading.Lock()
        self._early: dict[int, memoryview] = {}
        self._at = 0
        self._busy = False
        self._file: Any = None

    def write_at(self, offset: int, data: memoryview) -> None:
        with self._lock:
            self._early[offset] = data
            if self._busy:
                return  # the thread that writes takes this piece too
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

    def finish(self) -> None:
        try:
            if self._at != self._size:
                raise OSError(f"{self._where}: {self._at} of {self._size} bytes were sent")
            with as_os_errors(self._where):
                if self._file is None:
                    self._fs.pipe_file(self._path, b"")
                else:
                    self._file.close()
            self._file = None
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """See `FileWriter`. What the file system cannot take back is removed."""
        file, self._file = self._file, None
        self._early.clear()
        if file is None:
            return
        with contextlib.suppress(OSError), as_os_errors(self._where):
            from fsspec.spec import AbstractBufferedFile

            if isinstance(file, AbstractBufferedFile):
                file.discard()
                file.closed = True  # or its end would finish the upload
            else:
                file.close()
        with contextlib.suppress(OSError), as_os_errors(self._where):
            self._fs.rm_file(self._path)
