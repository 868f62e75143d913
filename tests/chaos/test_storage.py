"""Damage to existing files."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.chaos.storage import flip_byte, truncate


def test_damage_to_an_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\x00\x01\x02")
    flip_byte(path, 1)
    assert path.read_bytes() == b"\x00\xfe\x02"
    flip_byte(path, -1)
    assert path.read_bytes() == b"\x00\xfe\xfd"
    flip_byte(path, 1)
    flip_byte(path, -1)
    assert path.read_bytes() == b"\x00\x01\x02"
    truncate(path, 1)
    assert path.read_bytes() == b"\x00"
    with pytest.raises(ValueError, match="no byte at offset 1"):
        flip_byte(path, 1)
    with pytest.raises(ValueError, match="cannot be truncated to 2"):
        truncate(path, 2)
