"""The program that a campaign disturbs: its own training; `user_script.py` has the other one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from outlast.campaign import records
from outlast.campaign.plan import RoundPlan
from outlast.campaign.rounds.checks import leaks
from outlast.errors import OutlastError

R = TypeVar("R")


class CampaignError(OutlastError):
    """The undisturbed run has failed, or is different each time, so that nothing can be compared
    with it; or this machine cannot make the faults that were asked for.
    """


class Progress(Protocol):
    """Follows a running job.

    Attributes:
        last: the highest step that is known to be completed.
        records: how much has been seen.
    """

    last: int
    records: int

    def update(self) -> bool:
        """Reads what is new; whether there was anything."""
        ...


class Program(Protocol[R]):
    """A program, each run of which has a folder; `R` is the result of a run.

    Attributes:
        undisturbed_runs: how many are needed.
        temporary: the beginning of the names of temporary files that must not be left.
    """

    undisturbed_runs: ClassVar[int]
    temporary: ClassVar[str]

    def command(self, plan: RoundPlan, folder: Path) -> list[str]:
        """The script and its arguments."""
        ...

    def working_directory(self, folder: Path) -> Path | None:
        """Where it is started; `None`: where the campaign was."""
        ...

    def progress(self, folder: Path) -> Progress: ...

    def checkpoints(self, folder: Path) -> list[Path]:
        """The folders of checkpoints of a run."""
        ...

    def leaks(self, folder: Path) -> list[str]:
        """Processes that have more descriptors or threads after each restart."""
        ...

    def result(self, folders: Sequence[Path]) -> R:
        """The result of the undisturbed runs.

        Raises:
            CampaignError: if there is none, or if they differ.
        """
        ...

    def steps(self, result: R) -> int | None:
        """The steps of the program; `None`: as many as the plan says."""
        ...

    def differences(self, expected: R, folder: Path, plan: RoundPlan) -> list[str]:
        """What differs between a run and the undisturbed one, in words."""
        ...


@dataclasses.dataclass(frozen=True)
class OwnTraining:
    """The training of the campaign itself."""

    script: Path
    undisturbed_runs: ClassVar[int] = 1
    temporary: ClassVar[str] = ""

    def command(self, plan: RoundPlan, folder: Path) -> list[str]:
        options = f"--folder={folder}", f"--steps={plan.steps}", f"--seed={plan.seed}"
        return [str(self.script), *options]

    def working_directory(self, folder: Path) -> Path | None:
        return None

    def progress(self, folder: Path) -> Progress:
        return records.Progress(_records(folder))

    def checkpoints(self, folder: Path) -> list[Path]:
        checkpoints = folder / "checkpoints"
        return [checkpoints] if checkpoints.exists() else []

    def leaks(self, folder: Path) -> list[str]:
        # Processes on different hosts have the same IDs, so they cannot be told apart.
        return [] if RoundPlan.load(folder / "plan.json").hosts else leaks(_records(folder))

    def result(self, folders: Sequence[Path]) -> records.Reference:
        return records.Reference.read(_records(folders[0]))

    def steps(self, result: records.Reference) -> int | None:
        return None

    def differences(self, expected: records.Reference, folder: Path, plan: RoundPlan) -> list[str]:
        return records.differences(expected, _records(folder))


def _records(folder: Path) -> Path:
    return folder / "records"


AnyProgram = Program[Any]
