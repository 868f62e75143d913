"""`FaultyStorage`: writes that are slow, refused, cut off or corrupted."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.chaos.storage import (
    FaultyStorage,
    Flipped,
    Full,
    Slow,
    StorageFault,
    Torn,
    Write,
    flip_byte,
    truncate,
)


def test_without_faults(tmp_path: Path) -> None:
    storage = FaultyStorage(tmp_path)
    with storage.open("a", "wb") as file:
        assert file.write(b"123") == 3
        assert file.tell() == 3
        file.flush()
    with storage.open("a", "ab") as file:
        file.write(b"45")
    with storage.open("a") as file:
        assert file.read() == b"12345"
    storage.replace("a", "b")
    assert storage.names() == ["b"]
    assert storage.exists("b")
    storage.remove("b")
    assert not storage.exists("b")
    with pytest.raises(ValueError, match="mode is 'w'"):
        storage.open("a", "w")


def test_a_full_disk_stores_what_fits(tmp_path: Path) -> None:
    storage = FaultyStorage(tmp_path, Full(capacity_bytes=5))
    with storage.open("a", "wb") as file:
        file.write(b"123")
    with storage.open("b", "wb") as file:
        with pytest.raises(OSError, match="No space left") as caught:
            file.write(b"456")
        with pytest.raises(OSError, match="No space left"):
            file.write(b"7")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == "b"
    assert (tmp_path / "b").read_bytes() == b"45"


def test_a_torn_write_fails_or_is_silent(tmp_path: Path) -> None:
    loud = FaultyStorage(tmp_path, Torn(at_byte=4, files="*.bin"))
    with loud.open("a.bin", "wb") as file:
        file.write(b"123")
        with pytest.raises(OSError, match="Input/output error"):
            file.write(b"456")
    assert (tmp_path / "a.bin").read_bytes() == b"1234"
    silent = FaultyStorage(tmp_path, Torn(at_byte=4, files="*.bin", silently=True))
    for name, kept in (("b.bin", b"1234"), ("b.txt", b"123456789")):
        with silent.open(name, "wb") as file:
            assert [file.write(part) for part in (b"123", b"456", b"789")] == [3, 3, 3]
        assert (tmp_path / name).read_bytes() == kept


def test_a_byte_is_flipped(tmp_path: Path) -> None:
    storage = FaultyStorage(tmp_path, Flipped(offset=4))
    with storage.open("a", "wb") as file:
        file.write(b"\x00" * 3)
        file.write(b"\x00" * 3)
    assert (tmp_path / "a").read_bytes() == b"\x00\x00\x00\x00\xff\x00"


def test_a_slow_disk(tmp_path: Path) -> None:
    slept: list[float] = []
    slow = Slow(seconds_per_write=0.5, files="a*", sleep=slept.append)
    storage = FaultyStorage(tmp_path, slow)
    for name in ("a", "b"):
        with storage.open(name, "wb") as file:
            file.write(b"1")
            file.write(b"2")
    assert slept == [0.5, 0.5]


def test_faults_apply_in_order(tmp_path: Path) -> None:
    full = Full(capacity_bytes=100)
    storage = FaultyStorage(tmp_path, Torn(at_byte=2), full)
    with storage.open("a", "wb") as file, pytest.raises(OSError, match="Input/output"):
        file.write(b"123")
    assert full.used_bytes == 0


writes = st.binary(max_size=20).flatmap(
    lambda data: st.builds(Write, st.just("a"), st.integers(0, 30), st.just(data))
)
faults = st.one_of(
    st.builds(Torn, at_byte=st.integers(0, 40), silently=st.booleans()),
    st.builds(Full, capacity_bytes=st.integers(0, 40)),
    st.builds(Flipped, offset=st.integers(0, 40)),
)


@given(writes, faults)
def test_a_fault_never_adds_data(write: Write, fault: StorageFault) -> None:
    after = fault(write)
    assert (after.name, after.offset) == (write.name, write.offset)
    assert len(after.data) <= len(write.data)
    changed = [i for i, (a, b) in enumerate(zip(write.data, after.data, strict=False)) if a != b]
    assert len(changed) <= (1 if isinstance(fault, Flipped) else 0)
    assert after.error is None or len(after.data) < len(write.data)


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
