"""The model of the disk: which states a power loss may leave after a few calls."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from torture.calls import Call, Mode
from torture.disk import Disk, NotModelled, Tree, digest

MANY = 10_000


class Program:
    """Makes the calls of a small program, on paths below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inodes = {"": folder.stat().st_ino}
        for path in folder.rglob("*"):
            self._inodes[str(path.relative_to(folder))] = path.stat().st_ino
        self.disk = Disk(folder)

    def call(self, kind: str, name: str, other: str = "", **of: object) -> None:
        if kind in ("open", "mkdir"):
            self._inodes.setdefault(name, 10**12 + len(self._inodes))
        values: dict[str, object] = {"offset": 0, "size": 0, "flags": 0, "data": b"", **of}
        path = str(self._folder / name)
        self.disk.apply(
            Call(
                kind,
                path,
                str(self._folder / other) if other else "",
                pid=1,
                ok=True,
                error=0,
                inode=self._inodes.get(name, 0),
                number=0,
                mode=Mode.NEVER,
                **values,  # type: ignore[arg-type]
            )
        )
        if kind == "rename":
            self._inodes[other] = self._inodes.pop(name)

    def create(self, name: str, content: bytes) -> None:
        self.call("open", name, flags=os.O_CREAT | os.O_WRONLY)
        self.call("write", name, data=content)

    def states(self) -> list[Tree]:
        found = {digest(s): s for s in self.disk.states(Random(0), MANY)}
        return list(found.values())


def test_an_unsynced_file_is_there_or_not_and_in_part(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.create("a", b"x" * 8192)
    contents = [state.get("a") for state in program.states()]
    assert {None, b"", b"x" * 8192, bytes(8192)} <= set(contents)
    assert len(contents) > 5  # parts, and what another file left


def test_a_synced_file_without_a_synced_name_may_be_gone(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.create("a", b"content")
    program.call("fsync", "a")
    assert {str(state) for state in program.states()} == {"{}", "{'a': b'content'}"}
    program.call("fsync", "")
    assert program.states() == [{"a": b"content"}]


def test_a_rename_without_a_sync_may_have_the_name_and_not_the_data(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    program = Program(tmp_path)
    program.create("b", b"new")
    program.call("rename", "b", "a")
    assert {"a": b""} in program.states()
    program.call("fsync", "a")
    assert {str(s) for s in program.states()} == {
        "{'a': b'new'}",
        "{'a': b'old'}",
        "{'a': b'old', 'b': b'new'}",
    }


def test_an_exchange_is_atomic(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    program = Program(tmp_path)
    program.call("rename", "a", "b", flags=2)
    assert {str(s) for s in program.states()} == {
        "{'a': b'a', 'b': b'b'}",
        "{'a': b'b', 'b': b'a'}",
    }


def test_names_of_two_folders_are_independent(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    program = Program(tmp_path)
    program.call("unlink", "x/a")
    program.call("unlink", "b")
    assert len(program.states()) == 4
    program.call("fsync", "")
    assert len(program.states()) == 2


def test_an_overwritten_file_may_be_torn_between_sectors(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"o" * 8192)
    program = Program(tmp_path)
    program.call("pwrite", "a", data=b"n" * 8192)
    contents = {bytes(s["a"]) for s in program.states() if isinstance(s["a"], bytes)}
    assert any(content.count(b"n") % 4096 > 0 for content in contents)
    assert all(set(content) <= set(b"on") for content in contents)
    program.call("fsync", "a")
    assert program.states() == [{"a": b"n" * 8192}]


def test_what_is_not_modelled_is_refused(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.create("a", b"")
    with pytest.raises(NotModelled):
        program.call("mmap", "a")
