"""A folder in which nothing can be saved: a permanent error that names it and a remedy."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.system_errors import preparing
from outlast.errors import CheckpointError, FolderUnusable


@contextmanager
def other_user() -> Iterator[None]:
    """With root's rights, everything can be written to."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        text = rf"saved in {folder} on \S+: .*\. {tmp_path}/a is a file: remove it, or use another"
        with pytest.raises(FolderUnusable, match=text):
            LocalStorage(str(folder)).prepare()


@pytest.mark.parametrize("name", ["new", ".", "locked"])
def test_a_folder_without_write_access(name: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "locked").mkdir(mode=0o755)
        if name == "locked":
            (folder / "locked" / ".lock").touch(mode=0o400)
            (folder / "locked").chmod(0o777)
        folder.chmod(0o555)
        storage = LocalStorage(str(folder / name))
        text = r"Permission denied.*\. Give this user \(uid \d+\) write access"
        with other_user(), pytest.raises(FolderUnusable, match=text) as e:
            storage.prepare()
            storage.lock("this job")
        assert str(folder) in str(e.value)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EPERM, errno.ENOENT, errno.ENAMETOOLONG])
def test_what_does_not_pass_is_permanent(code: int, tmp_path: Path) -> None:
    with pytest.raises(FolderUnusable, match=re.escape(os.strerror(code))), preparing(tmp_path):
        raise OSError(code, os.strerror(code), str(tmp_path))
    assert FolderUnusable.permanent
    assert issubclass(FolderUnusable, CheckpointError)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_what_may_pass_is_not(code: int, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=re.escape(os.strerror(code))) as e, preparing(tmp_path):
        raise OSError(code, os.strerror(code), str(tmp_path))
    assert e.value.errno == code
