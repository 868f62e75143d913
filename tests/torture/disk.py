"""A disk, and what a power loss may leave on it: the legal states after each recorded call.

What is assumed of a file system, no more than POSIX and the kernel's documentation promise:

- `fsync` of a file makes its data and its size durable, not its name. Data that was written and
  not synced may be there, or not, block by block (4096 bytes; a block may be torn between sectors
  of 512), in any order, with the old or the new size. A block that is missing has the bytes that
  the file had there before; one that the file did not have is zero, or holds what some other file
  left on the disk.
- `fsync` of a folder makes its names durable: all that were changed before it. Changes of names
  that were not synced may be there or not, in any combination, except that two changes of one name
  come in their order. A rename is atomic, an exchange too, also between two folders; it is durable
  as soon as one of the two folders is synced.
- `O_DIRECT` alone makes nothing durable: a disk has a cache.
- What is durable stays as it is.

ext4 and xfs write names in their order (a journal), so they reach only some of these states.

    disk = Disk(root)
    for call in calls:
        disk.apply(call)
        for state in disk.states(random, 50): ...
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from random import Random

from .calls import Call

BLOCK_BYTES, SECTOR_BYTES = 4096, 512
_EXCHANGE, _NO_REPLACE, _KEEP_SIZE = 2, 1, 1
_CLOSED_SETS = 200  # of changes of names, all are tried up to this many

Name = tuple[int, str]
Tree = dict[str, "Tree | bytes"]


class NotModelled(Exception):
    """The program has made a call that this model does not have."""


@dataclasses.dataclass
class _File:
    durable: bytes = b""
    # (offset, data), or (size, None) for a truncation; `current` is all of them applied.
    pending: list[tuple[int, bytes | None]] = dataclasses.field(default_factory=list)
    current: bytearray = dataclasses.field(default_factory=bytearray)

    def write(self, offset: int, data: bytes | None) -> None:
        self.pending.append((offset, data))
        _apply(self.current, offset, data)

    def sync(self) -> None:
        self.pending.clear()
        self.durable = bytes(self.current)


@dataclasses.dataclass(frozen=True)
class _Change:
    """A change of names, all or nothing."""

    names: dict[Name, int | None]

    @property
    def folders(self) -> set[int]:
        return {folder for folder, _ in self.names}

    def after(self, other: _Change) -> bool:
        """Whether it cannot be there without `other`, which came before."""
        return not self.names.keys().isdisjoint(other.names)


class Disk:
    """The model of one folder, `root`, and all below it; what is there now is durable."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._files: dict[int, _File] = {}  # by our own numbers: the kernel's are used again
        self._folders: set[int] = set()
        self._durable: dict[Name, int] = {}
        self._now: dict[Name, int] = {}
        self._pending: list[_Change] = []
        self._numbers: dict[int, int] = {}  # by the kernel's
        self._unused = itertools.count()
        self._top = self._scan(root)

    def _scan(self, path: Path) -> int:
        found = path.lstat()
        number = self._new(found.st_ino)
        if stat.S_ISDIR(found.st_mode):
            self._folders.add(number)
            for inner in sorted(path.iterdir()):
                self._durable[number, inner.name] = self._now[number, inner.name] = self._scan(
                    inner
                )
        elif stat.S_ISREG(found.st_mode):
            content = path.read_bytes()
            self._files[number] = _File(content, [], bytearray(content))
        else:
            raise NotModelled(f"{path} is neither a file nor a folder")
        return number

    # ----------------------------------------------------------------------------- the calls

    def apply(self, call: Call) -> bool:
        """Carries out a call that has succeeded; returns whether it changed anything."""
        if not call.ok:
            return False
        match call.kind:
            case "open":
                return self._open(call)
            case "write" | "pwrite":
                self._file(call).write(call.offset, call.data)
            case "truncate":
                self._file(call).write(call.size, None)
            case "fallocate":
                if call.flags & ~_KEEP_SIZE:
                    raise NotModelled(f"{call}: mode {call.flags}")
                file, size = self._file(call), call.offset + call.size
                if call.flags & _KEEP_SIZE or size <= len(file.current):
                    return False
                file.write(size, None)
            case "fsync":
                return self._sync(self._numbers[call.inode])
            case "mkdir":
                number = self._new(call.inode)
                self._folders.add(number)
                self._change({self._name(call.path): number})
            case "unlink" | "rmdir":
                self._change({self._name(call.path): None})
            case "link":
                self._change({self._name(call.other): self._now[self._name(call.path)]})
            case "rename":
                a, b = self._name(call.path), self._name(call.other)
                there = self._now.get(b) if call.flags & _EXCHANGE else None
                self._change({a: there, b: self._now[a]})
            case "note" | "close":
                return False
            case "mmap" | "symlink" | "copy_file_range":
                raise NotModelled(str(call))
            case _:
                return False  # a read
        return True

    def _open(self, call: Call) -> bool:
        name = self._name(call.path)
        if not name[1]:  # the folder itself
            return False
        if name not in self._now:
            if not call.flags & os.O_CREAT:
                raise NotModelled(f"{call} opens what the record does not have")
            number = self._new(call.inode)
            self._files[number] = _File()
            self._change({name: number})
            return True
        if call.flags & os.O_TRUNC and self._files[self._now[name]].current:
            self._files[self._now[name]].write(0, None)
            return True
        return False

    def _sync(self, number: int) -> bool:
        if number in self._files:
            changed = bool(self._files[number].pending)
            self._files[number].sync()
            return changed
        durable: set[int] = set()
        for at in reversed(range(len(self._pending))):
            change = self._pending[at]
            if number in change.folders or any(self._pending[i].after(change) for i in durable):
                durable.add(at)
        for at in sorted(durable):
            _rename(self._durable, self._pending[at])
        self._pending = [c for at, c in enumerate(self._pending) if at not in durable]
        return bool(durable)

    def _new(self, inode: int) -> int:
        number = self._numbers[inode] = next(self._unused)
        return number

    def _file(self, call: Call) -> _File:
        return self._files[self._numbers[call.inode]]

    def _name(self, path: str) -> Name:
        parts = os.path.normpath(path)[len(self._root) :].strip("/").split("/")
        folder = self._top
        for part in parts[:-1]:
            folder = self._now[folder, part]
        return folder, parts[-1]

    def _change(self, names: dict[Name, int | None]) -> None:
        change = _Change(names)
        self._pending.append(change)
        _rename(self._now, change)

    # ---------------------------------------------------------------------------- the states

    def states(self, random: Random, most: int) -> Iterator[Tree]:
        """What a power loss now may leave: all combinations if there are `most` at most, otherwise
        a sample, with the extremes in it. Some may be equal.
        """
        chosen = list(itertools.islice(self._closed_sets(), _CLOSED_SETS + 1))
        dirty = [n for n, file in self._files.items() if file.pending]
        variants = {n: list(_variants(self._files[n], random)) for n in dirty}
        count = len(chosen)
        for each in variants.values():
            count *= len(each)
        if len(chosen) <= _CLOSED_SETS and count <= most:
            for names in chosen:
                for contents in itertools.product(*variants.values()):
                    yield self._tree(names, dict(zip(dirty, contents, strict=True)))
            return
        everything = frozenset(range(len(self._pending)))
        for names in (frozenset[int](), everything):
            for i in (0, 1):  # the first variants: nothing, and everything
                yield self._tree(names, {n: variants[n][i] for n in dirty})
        for _ in range(max(most - 4, 0)):
            if len(chosen) <= _CLOSED_SETS:
                names = random.choice(chosen)
            else:
                names = self._random_set(random)
            yield self._tree(names, {n: random.choice(variants[n]) for n in dirty})

    def _needs(self, at: int) -> list[int]:
        return [i for i in range(at) if self._pending[at].after(self._pending[i])]

    def _closed_sets(self) -> Iterator[frozenset[int]]:
        """All sets of pending changes that can be there without the others."""
        needs = [set(self._needs(at)) for at in range(len(self._pending))]

        def from_(at: int, taken: frozenset[int]) -> Iterator[frozenset[int]]:
            if at == len(needs):
                yield taken
                return
            if needs[at] <= taken:
                yield from from_(at + 1, taken | {at})
            yield from from_(at + 1, taken)

        return from_(0, frozenset())

    def _random_set(self, random: Random) -> frozenset[int]:
        taken: set[int] = set()
        likely = random.choice((0.1, 0.5, 0.9))
        for at in range(len(self._pending)):
            if random.random() < likely and set(self._needs(at)) <= taken:
                taken.add(at)
        return frozenset(taken)

    def _tree(self, changes: frozenset[int], contents: dict[int, bytes]) -> Tree:
        names = dict(self._durable)
        for at in sorted(changes):
            _rename(names, self._pending[at])
        inside: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), number in names.items():
            inside.setdefault(folder, []).append((name, number))

        def below(folder: int) -> Tree:
            return {
                name: below(n) if n in self._folders else contents.get(n, self._files[n].durable)
                for name, n in sorted(inside.get(folder, ()))
            }

        return below(self._top)


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
    end = offset + len(data or b"")
    if end > len(content):
        content.extend(bytes(end - len(content)))
    if data:
        content[offset:end] = data


def _rename(names: dict[Name, int], change: _Change) -> None:
    for name, number in change.names.items():
        if number is None:
            names.pop(name, None)
        else:
            names[name] = number


def _variants(file: _File, random: Random) -> Iterator[bytes]:
    """Contents of a file after a power loss; first nothing, then everything that was not synced."""
    yield file.durable
    yield bytes(file.current)
    partly = bytearray(file.durable)
    for offset, data in file.pending[:-1][:3]:  # in the order of the writes
        _apply(partly, offset, data)
        yield bytes(partly)
    old, new = file.durable, bytes(file.current)
    longest = max(len(old), len(new))
    if not longest:
        return
    filled = old.ljust(longest, b"\0")
    yield filled[: len(new)]  # the size, not the data
    yield new[: len(old)]  # the data, not the size
    garbage = random.randbytes(longest)
    yield (old + garbage[len(old) :])[: len(new)]
    for likely in (0.2, 0.5, 0.8):  # some blocks, one of them torn
        mixed = bytearray(random.choice((filled, old + garbage[len(old) :])))
        blocks = range(0, longest, BLOCK_BYTES)
        torn = random.choice(blocks)
        for at in blocks:
            if random.random() < likely:
                mixed[at : at + BLOCK_BYTES] = new[at : at + BLOCK_BYTES].ljust(
                    len(mixed[at : at + BLOCK_BYTES]), b"\0"
                )
        cut = torn + SECTOR_BYTES * random.randrange(1, BLOCK_BYTES // SECTOR_BYTES)
        mixed[torn:cut] = new[torn:cut].ljust(len(mixed[torn:cut]), b"\0")
        yield bytes(mixed[: random.choice((len(old), len(new)))])


def digest(tree: Tree) -> bytes:
    """A key for equal trees."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, content in tree.items():
        hashed.update(name.encode() + b"\0")
        inner = content if isinstance(content, bytes) else digest(content)
        hashed.update(len(inner).to_bytes(8, "little"))
        hashed.update(inner)
    return hashed.digest()


def build(tree: Tree, folder: Path) -> None:
    """Makes the folder what the tree says; it must not exist."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            build(content, folder / name)
