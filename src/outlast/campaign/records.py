"""What the ranks of a round's training write down, for the comparison with the undisturbed run.

One file for each kind of record, to which all processes append; a record is one line, written by
one `write`, so that a process that is killed leaves whole lines.

    steps.jsonl     {"step": 3, "rank": 1, "loss": "0x1.8p+0"}   after the optimizer's step
    entries.jsonl   {"pid": 17, "threads": 4, ...}             at each entry into the function
    ends.jsonl      {"rank": 1, "weights": "ab12...", ...}       at the end of the training
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from outlast.errors import EventLogError

_STEPS, _ENTRIES, _ENDS = "steps.jsonl", "entries.jsonl", "ends.jsonl"
_NAMED = 5  # differences of one kind that are named


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A completed step of one rank; `loss` is the exact value, from `float.hex`."""

    step: int
    rank: int
    loss: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of a process into the training function, and the resources it had: how many of each
    kind of descriptor (a file's name, a socket, a pipe, ...), and how many threads.
    """

    pid: int
    rank: int
    iteration: int
    descriptors: dict[str, int]
    threads: int

    @classmethod
    def now(cls, rank: int, iteration: int) -> Entry:
        """That of this process, now. What only the garbage collector holds does not count."""
        gc.collect()
        kinds = Counter(map(_kind_of_descriptor, os.listdir("/proc/self/fd")))
        threads = len(os.listdir("/proc/self/task"))
        return cls(
            pid=os.getpid(),
            rank=rank,
            iteration=iteration,
            descriptors=dict(kinds),
            threads=threads,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """The result of a rank: the SHA-256 of the weights, of the optimizer's state, and the place in
    the data.
    """

    rank: int
    steps: int
    samples: int
    weights: str
    optimizer: str


class Records:
    """Writes the records of one process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def write(self, record: Step | Entry | End) -> None:
        """Appends a record to the file of its kind."""
        name = {Step: _STEPS, Entry: _ENTRIES, End: _ENDS}[type(record)]
        line = json.dumps(dataclasses.asdict(record)) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._folder / name, flags, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


class Progress:
    """Follows the steps of a running job."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _STEPS
        self._offset = 0
        self.last = 0
        """The highest step that a rank has completed."""
        self.records = 0

    def update(self) -> bool:
        """Reads what is new; whether there was anything."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return False
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError) as error:  # a disk that was full for a while
                raise EventLogError(f"{self._path}: {line!r} is not a record") from error
            self.last = max(self.last, step)
            self.records += 1
        return bool(whole)


def read_steps(folder: Path) -> list[Step]:
    """The steps of all ranks, in the order in which they were written."""
    return [Step(**values) for values in _lines(folder / _STEPS)]


def read_entries(folder: Path) -> list[Entry]:
    """The entries of all processes."""
    return [Entry(**values) for values in _lines(folder / _ENTRIES)]


def read_ends(folder: Path) -> list[End]:
    """The results of all ranks that completed."""
    return [End(**values) for values in _lines(folder / _ENDS)]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The result of the undisturbed run.

    Attributes:
        losses: the exact loss of each step on each rank, by (step, rank).
        ends: the result of each rank.
    """

    losses: dict[tuple[int, int], str]
    ends: dict[int, End]

    @classmethod
    def read(cls, folder: Path) -> Reference:
        """From the records of a run."""
        losses = {(one.step, one.rank): one.loss for one in read_steps(folder)}
        return cls(losses, {end.rank: end for end in read_ends(folder)})


def differences(reference: Reference, folder: Path) -> list[str]:
    """What differs between the records in `folder` and the reference, in words.

    Steps that were repeated after a restore must have the same loss each time. A rank that dies
    between the collective of a step and its record has none of that step, if the other ranks have
    completed it: its replacement continues from their state.
    """
    steps = read_steps(folder)
    return [*_of_losses(reference.losses, steps), *_of_ends(reference.ends, read_ends(folder))]


def _of_losses(expected: dict[tuple[int, int], str], steps: Sequence[Step]) -> Iterable[str]:
    wrong = [
        f"step {one.step} on rank {one.rank}: the loss is {one.loss}, undisturbed "
        f"{expected.get((one.step, one.rank), 'there is no such step')}"
        for one in steps
        if expected.get((one.step, one.rank)) != one.loss
    ]
    yield from wrong[:_NAMED]
    if len(wrong) > _NAMED:
        yield f"... and {len(wrong) - _NAMED} more losses"
    missing = sorted({step for step, _ in expected} - {one.step for one in steps})
    if missing:
        yield f"{len(missing)} steps were never trained, the first is step {missing[0]}"


def _of_ends(expected: dict[int, End], ends: Sequence[End]) -> Iterable[str]:
    for end in ends:
        for field in dataclasses.fields(End):
            value, wanted = getattr(end, field.name), getattr(expected[end.rank], field.name)
            if value != wanted:
                yield f"rank {end.rank}: {field.name} in the end is {value}, undisturbed {wanted}"
    missing = sorted(expected.keys() - {end.rank for end in ends})
    if missing:
        yield f"no result of ranks {', '.join(map(str, missing))}"


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise EventLogError(f"{path}, line {number} is not a record: {error}") from error
    return found


def _kind_of_descriptor(descriptor: str) -> str:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return "closed"  # that of the folder itself
    return target.partition(":[")[0] if target.startswith(("socket:", "pipe:")) else target
