"""The lease page: one writer, readers in other processes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from outlast.system import lease_page
from outlast.system.lease_page import LeasePage


def test_a_reader_sees_each_renewal(tmp_path: Path) -> None:
    page = LeasePage.create(tmp_path)
    reader = LeasePage.open(page.path)
    assert (reader.deadline, reader.valid()) == (0.0, False)
    page.renew(lease_page.now() + 60)
    assert (reader.deadline, reader.valid()) == (page.deadline, True)
    page.renew(lease_page.now())
    assert not reader.valid()
    assert stat.S_IMODE(page.path.stat().st_mode) == 0o600
    reader.close()
    page.close()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    page = LeasePage.create(tmp_path)
    reader = LeasePage.open(page.path)
    with pytest.raises(TypeError):
        reader.renew(1.0)
    reader.close()
    page.close()


def test_a_file_that_is_no_page(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"")
    with pytest.raises(ValueError, match="mmap"):
        LeasePage.open(tmp_path / "short")
    with pytest.raises(FileNotFoundError):
        LeasePage.open(tmp_path / "none")
