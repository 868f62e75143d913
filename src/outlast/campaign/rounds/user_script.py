"""The user's script as the program of a campaign.

Of a script, nothing is known but what `outlast` itself sees: the steps of its `Job`, in the events,
and its checkpoints. So the last checkpoint of each of its folders is compared, every tensor by a
checksum of its values. A script that differs from itself without any fault cannot be judged: it
runs twice undisturbed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from outlast.async_checkpoint import named_files
from outlast.async_checkpoint.named_files import tensor_checksums
from outlast.campaign.plan import RoundPlan
from outlast.campaign.rounds.figures import DAMAGING
from outlast.campaign.rounds.programs import CampaignError, Progress
from outlast.errors import CheckpointError
from outlast.events import StepsDone
from outlast.events.follow import Follower
from outlast.events.run_folders import runs_in

FOLDER = "{folder}"
"""In the arguments of a script: the folder of the run."""
_NAMED = 5
_GENERATORS = "random."  # in a checkpoint of `Job`


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a script has left.

    Attributes:
        steps: of its `Job`.
        checkpoints: by folder, the step of the last checkpoint and the checksums of its tensors.
        unseeded: the states of random generators that nobody has seeded.
    """

    steps: int
    checkpoints: dict[str, tuple[int, dict[str, str]]]
    unseeded: frozenset[str] = frozenset()


class UserScript:
    """A script, and its arguments.

    Each run has a working directory of its own, unless an argument contains `{folder}`, which each
    run gets as a folder of its own then. Its checkpoints are found there.

    Raises:
        CampaignError: if there is no such script.
    """

    undisturbed_runs: ClassVar[int] = 2
    temporary: ClassVar[str] = "outlast"

    def __init__(self, command: Sequence[str]) -> None:
        self._script, *self._arguments = command
        if not Path(self._script).is_file():
            raise CampaignError(f"{self._script} is not a file: pass a script and its arguments")
        self._has_place = any(FOLDER in argument for argument in self._arguments)

    def command(self, plan: RoundPlan, folder: Path) -> list[str]:
        place = str(_place(folder))
        arguments = [argument.replace(FOLDER, place) for argument in self._arguments]
        return [str(Path(self._script).absolute()), *arguments]

    def working_directory(self, folder: Path) -> Path | None:
        _place(folder).mkdir(exist_ok=True)
        return None if self._has_place else _place(folder)

    def progress(self, folder: Path) -> Progress:
        return EventProgress(folder / "events")

    def checkpoints(self, folder: Path) -> list[Path]:
        manifests = _place(folder).rglob(named_files.MANIFEST)
        return sorted({manifest.parent.parent for manifest in manifests})

    def leaks(self, folder: Path) -> list[str]:
        return []

    def result(self, folders: Sequence[Path]) -> Trained:
        first = self._trained(folders[0])
        unseeded = set[str]()
        for folder in folders[1:]:
            again = self._trained(folder)
            for name in first.checkpoints.keys() & again.checkpoints.keys():
                tensors = _unequal(first.checkpoints[name][1], again.checkpoints[name][1])
                unseeded.update(one for one in tensors if one.startswith(_GENERATORS))
            expected = dataclasses.replace(first, unseeded=frozenset(unseeded))
            if wrong := _different(expected, again.checkpoints):
                raise CampaignError(
                    "two undisturbed runs differ, so that no difference could be blamed on a "
                    "fault; seed everything, and save at the end: " + "; ".join(wrong)
                )
        return dataclasses.replace(first, unseeded=frozenset(unseeded))

    def steps(self, result: Trained) -> int | None:
        return result.steps

    def differences(self, expected: Trained, folder: Path, plan: RoundPlan) -> list[str]:
        found = {}
        for name in expected.checkpoints:
            try:
                last = _last_checkpoint(_place(folder) / name)
            except CheckpointError as error:
                if any(fault.kind in DAMAGING for fault in plan.faults):
                    continue
                return [f"the last checkpoint is damaged: {error}"]
            if last is None:
                return [f"there is no checkpoint in {name}"]
            found[name] = last
        return _different(expected, found)

    def _trained(self, folder: Path) -> Trained:
        progress = self.progress(folder)
        progress.update()
        if not progress.last:
            raise CampaignError(
                "the script has completed no step of `outlast.Job`, by which faults are planned"
            )
        lasts = {place: _last_checkpoint(place) for place in self.checkpoints(folder)}
        names = {
            str(place.relative_to(_place(folder))): last for place, last in lasts.items() if last
        }
        if not names:
            raise CampaignError(
                f"the script has written no checkpoint in {_place(folder)}: it must save to a "
                "relative folder, which is in a working directory of the run then, or to one that "
                f"an argument names with {FOLDER}"
            )
        return Trained(progress.last, names)


class EventProgress:
    """Follows the events of a job. Its steps come every ten seconds, and at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._followers: dict[Path, Follower] = {}
        self.last = self.records = 0

    def update(self) -> bool:
        before = self.records
        for run in runs_in(self._folder) if self._folder.exists() else ():
            follower = self._followers.setdefault(run.folder, Follower(run.folder))
            for event in follower.poll():
                self.records += 1
                if isinstance(event, StepsDone):
                    self.last = max(self.last, event.last)
        return self.records > before


def _place(folder: Path) -> Path:
    return folder / "work"


def _last_checkpoint(folder: Path) -> tuple[int, dict[str, str]] | None:
    """The step and the tensors of the newest committed checkpoint; `None` if there is none.

    Raises:
        CheckpointError: if it is damaged.
    """
    with contextlib.closing(named_files.open_storage(str(folder))) as storage:
        newest = next(iter(named_files.candidates(storage)), None)
        return None if newest is None else (newest[0], tensor_checksums(storage, newest[1]))


def _unequal(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _different(expected: Trained, found: dict[str, tuple[int, dict[str, str]]]) -> list[str]:
    """What differs between these checkpoints, and those that are expected in the same folders."""
    differences = []
    for name, (step, tensors) in found.items():
        wanted_step, wanted = expected.checkpoints.get(name, (None, {}))
        if step != wanted_step:
            differences.append(
                f"the last checkpoint in {name} is of step {step}, not {wanted_step}"
            )
            continue
        wrong = [one for one in _unequal(wanted, tensors) if one not in expected.unseeded]
        differences += [
            f"{one} of step {step} in {name} is {tensors.get(one)}, undisturbed {wanted.get(one)}"
            for one in wrong[:_NAMED]
        ]
        if len(wrong) > _NAMED:
            differences.append(f"... and {len(wrong) - _NAMED} more tensors")
    return differences
