"""The training that a campaign disturbs: its own, or the user's script.

Of a script, nothing is known but what `outlast` itself sees: the steps of its `Job`, in the events,
and its checkpoints. So the last checkpoint of each of its folders is compared, every tensor by a
checksum of its values. A script that differs from itself without any fault cannot be judged: it
runs twice undisturbed. The own training writes its losses and its final weights as events.

In both ways, the result of a run is a list of names with exact values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from outlast.async_checkpoint import inspection
from outlast.async_checkpoint.inspection import tensor_checksums
from outlast.campaign.figures import DAMAGING
from outlast.campaign.notes import END, STEP, Progress, read_notes, work_of
from outlast.campaign.plan import RoundPlan
from outlast.errors import CheckpointError, OutlastError
from outlast.events.event import Note

FOLDER = "{folder}"
"""In the arguments of a script: the folder of the run."""
_LOSS = "the loss"
"""Begins the names of values that a run may lack: a rank that dies between the collective of a step
and its note has none of that step, if the other ranks have completed it.
"""
_MOVE_S = 30.0  # the training lasts for so long for each move
_OWN_STALL_S = 150.0
_STALL_S = 900.0  # more than the default timeouts of the wrapper, after which hangs end
_GENERATORS = "random."  # in a checkpoint of `Job`
_NAMED = 5

Reference = Mapping[str, str | None]
"""The values of the undisturbed run; `None` for one that is different each time."""


class CampaignError(OutlastError):
    """The undisturbed run has failed, or is different each time, so that nothing can be compared
    with it; or this machine cannot make the faults that were asked for.
    """


class Program:
    """A script and its arguments, each run of which has a folder.

    The script has a working directory in it, unless an argument contains `{folder}`, which is a
    folder in it then. Its checkpoints are found there. `own`: whether it is the training of the
    campaign, which writes notes (`training.py`). Only this one is told of `device`.
    """

    def __init__(self, command: Sequence[str], *, own: bool = False, device: str = "cpu") -> None:
        self._script, *self._arguments = command
        if not own and not Path(self._script).is_file():
            raise CampaignError(f"{self._script} is not a file: pass a script and its arguments")
        self.own, self._device = own, device
        self._stays_here = own or any(FOLDER in argument for argument in self._arguments)
        self.undisturbed_runs = 1 if own else 2
        self.stall_s = _OWN_STALL_S if own else _STALL_S
        """A job in which no rank completes a step for this long has failed."""
        self.temporary = "" if own else "outlast"
        """The beginning of the names of temporary files that must not be left."""

    def command(self, plan: RoundPlan, folder: Path) -> list[str]:
        work = str(work_of(folder))
        arguments = [argument.replace(FOLDER, work) for argument in self._arguments]
        if self.own:
            arguments = [f"--folder={work}", f"--steps={plan.steps}", f"--seed={plan.seed}"]
            arguments.append(f"--device={self._device}")
            if plan.moves:  # during which the training goes on
                arguments.append(f"--pause={_MOVE_S * len(plan.launcher) / plan.steps:.2f}")
        return [str(Path(self._script).absolute()), *arguments]

    def working_directory(self, folder: Path) -> Path | None:
        """Where it is started; `None`: where the campaign was."""
        work_of(folder).mkdir(exist_ok=True)
        return None if self._stays_here else work_of(folder)

    def checkpoints(self, folder: Path) -> list[Path]:
        found = {path.parent.parent for path in work_of(folder).rglob(inspection.MANIFEST)}
        own = work_of(folder) / "checkpoints"  # it may have no checkpoint yet
        return sorted(found | ({own} if self.own and own.exists() else set()))

    def progress(self, folder: Path) -> Progress:
        return Progress(folder, own=self.own)

    def reference(self, folders: Sequence[Path]) -> Reference:
        """The result of the undisturbed runs; a `CampaignError` says that there is none, or that
        they differ.
        """
        first: dict[str, str | None] = dict(self._values(folders[0]))
        if not first:
            raise CampaignError(
                f"the script has written no checkpoint in {work_of(folders[0])}: it must save to a "
                "relative folder, which is in a working directory of the run then, or to one that "
                f"an argument names with {FOLDER}"
            )
        for folder in folders[1:]:
            again = dict(self._values(folder))
            for name in first.keys() | again.keys():
                if name.startswith(_GENERATORS) and first.get(name) != again.get(name):
                    first[name] = None  # nobody has seeded it
            if wrong := _different(first, again.items()):
                raise CampaignError(
                    "two undisturbed runs differ, so that no difference could be blamed on a "
                    "fault; seed everything, and save at the end: " + "; ".join(wrong)
                )
        return first

    def steps(self, folder: Path) -> int:
        progress = self.progress(folder)
        progress.update()
        if not progress.last:
            raise CampaignError(
                "the script has completed no step of `outlast.Job`, by which faults are planned"
            )
        return progress.last

    def differences(self, expected: Reference, folder: Path, plan: RoundPlan) -> list[str]:
        """What differs between a run and the undisturbed one, in words."""
        damaged: dict[str, CheckpointError] = {}
        found = self._values(folder, damaged)
        planned = any(fault.kind in DAMAGING for fault in plan.faults)
        if damaged and not planned:
            return [f"the last checkpoint is damaged: {error}" for error in damaged.values()]
        unknown = tuple(f" in {place}" for place in damaged)
        expected = {name: one for name, one in expected.items() if not name.endswith(unknown)}
        return _different(expected, found)

    def _values(
        self, folder: Path, damaged: dict[str, CheckpointError] | None = None
    ) -> list[tuple[str, str]]:
        """The result of a run: names, and exact values; several, if a step was repeated. Damaged
        checkpoints are added to `damaged`, or raised.
        """
        if self.own:
            return list(_noted(read_notes(folder)))
        values = []
        for place in self.checkpoints(folder):
            name = str(place.relative_to(work_of(folder)))
            try:
                with contextlib.closing(inspection.open_storage(str(place))) as storage:
                    step, last = next(iter(inspection.candidates(storage)), (None, ""))
                    if step is not None:
                        tensors = tensor_checksums(storage, last)
                        values.append((f"the step of the last checkpoint in {name}", str(step)))
                        values += [(f"{one} in {name}", value) for one, value in tensors.items()]
            except CheckpointError as error:
                if damaged is None:
                    raise
                damaged[name] = error
        return values


def _noted(notes: Iterable[Note]) -> Iterator[tuple[str, str]]:
    for note in notes:
        if note.name == STEP:
            yield f"step {note.data['step']}", "trained"
            yield f"{_LOSS} of step {note.data['step']} on rank {note.rank}", note.data["loss"]
        elif note.name == END:
            for name, value in note.data.items():
                yield f"{name} in the end on rank {note.rank}", str(value)


def _different(expected: Reference, found: Iterable[tuple[str, str]]) -> list[str]:
    """What differs between the values that were found and the expected ones, in words."""
    names, wrong = set(), []
    for name, value in found:
        names.add(name)
        wanted = expected.get(name, "there is no such value")
        if wanted not in (value, None):
            wrong.append(f"{name} is {value}, undisturbed {wanted}")
    missing = [f"{name} is missing" for name in expected if name not in names]
    wrong += [one for one in missing if not one.startswith((_LOSS, _GENERATORS))]
    more = [f"... and {len(wrong) - _NAMED} more"] if len(wrong) > _NAMED else []
    return [*wrong[:_NAMED], *more]
