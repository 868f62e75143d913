"""The record that a host keeps of the groups of its run: what was durable must be found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from outlast.launch.hosts.replicated.past import Past
from outlast.launch.hosts.replicated.record import Record, open_record

from ..calls import Calls


class HostRecord:
    """A record, in a folder that may not exist. A save is a change; its number, the generation."""

    name = "record"

    def prepare(self, folder: Path, random: Random) -> int:
        folder.mkdir()
        self._first = random.choice((0, 2))
        if self._first:
            record = _open(folder)
            record.set(Past(generation=self._first))
            record.close()
        return self._first

    def run(self, folder: Path, calls: Calls) -> None:
        record = _open(folder)
        for number in range(self._first + 1, self._first + 4):
            calls.note(f"begun {number}")
            record.set(Past(generation=number))
            calls.note(f"committed {number}")
        record.close()

    @contextlib.contextmanager
    def restorer(self) -> Iterator[Callable[[Path, bool], int]]:
        def restore(folder: Path, saves_too: bool) -> int:
            if (records := folder / "records").exists():
                records.chmod(0o700)  # the model of the disk keeps no modes
            record = _open(folder)
            found = record.past.generation
            if saves_too:
                record.set(Past(generation=found + 1))
                assert record.durable, "the next change is not kept"
            record.close()
            return found

        yield restore


def _open(folder: Path) -> Record:
    return open_record("torture", [("h1", 1)], "h1", str(folder / "records"))
