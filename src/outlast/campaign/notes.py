"""The notes of the campaign's own training, and the progress of a running job.

A note is an event, written by one `write` to a file to which all processes of the training append,
so that a process that is killed leaves whole lines.
"""

from __future__ import annotations

from pathlib import Path

from outlast.errors import EventLogError
from outlast.events.event import Note
from outlast.events.run_folders import Follower, runs_in
from outlast.events.types import StepsDone

STEP, ENTRY, END = "step", "entry", "end"
"""The notes of the own training: a completed step of a rank, with its exact loss; an entry of a
process into the training function, with the descriptors and threads that it had; the result of a
rank.
"""


class Progress:
    """Follows the events of a running job, or the notes of the own training. The steps of a script
    come every ten seconds, and at its end.
    """

    def __init__(self, folder: Path, *, own: bool) -> None:
        self._folder, self._own = folder, own
        self._followers: dict[Path, Follower] = {}
        self.last = 0  # the highest step that is known to be completed
        self.events = 0  # how many events have been read

    def update(self) -> bool:
        before = self.events
        for place in self._places():
            follower = self._followers.setdefault(place, Follower(place))
            for event in follower.poll():
                self.events += 1
                if isinstance(event, StepsDone):
                    self.last = max(self.last, event.last)
                elif isinstance(event, Note) and event.name == STEP:
                    self.last = max(self.last, event.data["step"])
        return self.events > before

    def _places(self) -> list[Path]:
        if self._own:
            place = notes_in(work_of(self._folder)).parent
            return [place] if place.exists() else []
        events = self._folder / "events"
        return [run.folder for run in runs_in(events)] if events.exists() else []


def notes_in(work: Path) -> Path:
    """The file of the notes of the own training, to which all of its processes append."""
    return work / "notes" / "training.jsonl"


def read_notes(folder: Path) -> list[Note]:
    """The notes of a run of the own training, in the order in which they were written."""
    path = notes_in(work_of(folder))
    if not path.exists():
        return []
    follower = Follower(path.parent)
    notes = [event for event in follower.poll() if isinstance(event, Note)]
    if follower.damaged:
        raise EventLogError(follower.damaged[0])
    return notes


def work_of(folder: Path) -> Path:
    """The working folder of a run: what its script writes is in it."""
    return folder / "work"
