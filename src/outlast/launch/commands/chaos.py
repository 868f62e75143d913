"""`outlast chaos campaign`: a training under many faults, compared with an undisturbed run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from outlast.errors import ChaosError, OutlastError
from outlast.launch.commands.shared import exit_on

_STALL_S = 900.0
"""More than the default timeouts of the restart wrapper, after which hangs end."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(help="Inject faults, and check what they do.", no_args_is_help=True)
    # A group of one command would otherwise become that command.
    group.callback()(lambda: None)
    group.command("campaign")(campaign)
    app.add_typer(group, name="chaos")


def campaign(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT ARGUMENT...]",
            help="A script that trains with Job, and saves to a relative folder, or to one below "
            "'{folder}' in an argument. Default: a training of the campaign's own.",
            show_default=False,
        ),
    ] = None,
    faults: Annotated[
        int | None,
        typer.Option(
            "--faults",
            min=1,
            help="How many faults to fire. Default: 1000, of a script 20; no limit with --seconds.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=1, help="End after about this time.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the plans and the training.")] = 0,
    ranks: Annotated[int, typer.Option("--nproc-per-node", min=1, help="Ranks of each job.")] = 4,
    kinds: Annotated[
        str,
        typer.Option("--kinds", metavar="KIND,...", help="Only these kinds. Default: all."),
    ] = "",
    per_round: Annotated[
        int, typer.Option("--faults-per-round", min=1, help="Faults in one job.")
    ] = 40,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            help="Rounds at the same time. Default: the number of cores, at most 8.",
            show_default=False,
        ),
    ] = None,
    standby: Annotated[
        int, typer.Option("--standby", min=0, help="Standby processes of each job.")
    ] = 2,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Write results.json, and keep failed rounds. Default: a new temporary folder.",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay", metavar="FILE", help="Run the plan of one round.", show_default=False
        ),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep the folders of all rounds, not only of failed ones."),
    ] = False,
    shrink: Annotated[
        bool, typer.Option("--shrink/--no-shrink", help="Shorten the plans of failed rounds.")
    ] = True,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            help="Write the table there too; if the file is a page with the lines "
            "'<!-- campaign: begin -->' and '<!-- campaign: end -->', between them.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train through planned faults, and compare each loss and the final weights, bit by bit, with
    an undisturbed run; of a script, every tensor of its last checkpoints. The exit code is 1 if
    anything differs or is left over.
    """
    from rich.console import Console

    from outlast.campaign.campaign import Campaign, default_jobs
    from outlast.campaign.generate import OF_SCRIPTS, parse_kinds
    from outlast.campaign.plan import RoundPlan
    from outlast.campaign.results import Display, write_markdown
    from outlast.campaign.round import Options
    from outlast.chaos import Kind

    try:
        chosen = parse_kinds([name for part in kinds.split(",") if (name := part.strip())])
        if script and not kinds:
            chosen = OF_SCRIPTS
        elif script and (others := [str(kind) for kind in chosen if not isinstance(kind, Kind)]):
            raise ValueError(f"{', '.join(others)}: only for the training of the campaign")
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint="--kinds") from e
    if faults is None and seconds is None:
        faults = 20 if script else 1000
    console = Console()
    with exit_on(OutlastError, OSError), contextlib.ExitStack() as stack:
        plan = None if replay is None else RoundPlan.load(replay)
        folder = Path(tempfile.mkdtemp(prefix="outlast-campaign-")) if out is None else out
        options = Options(
            out=folder,
            faults=faults,
            seconds=seconds,
            seed=seed,
            ranks=ranks,
            kinds=chosen,
            command=tuple(script or ()),
            stall_s=_STALL_S if script else Options.stall_s,
            per_round=per_round,
            jobs=default_jobs() if jobs is None else jobs,
            standby=standby,
            keep=keep,
            shrink=shrink,
        )
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder, stack)
        status = stack.enter_context(console.status("starting"))
        stack.enter_context(_ended_by_signals(lambda: status.update("ending the running jobs")))
        display = Display(console, status, None if replay else faults)
        running = Campaign(options, display)
        if plan is not None and replay is not None:
            place = running.folder_of(plan)
            if replay.resolve().is_relative_to(place.resolve()):
                raise ChaosError(
                    f"{replay} is in {place}, which this run would replace: pass another folder "
                    "as --out"
                )
        try:
            result = running.run() if plan is None else running.replay(plan)
        except (KeyboardInterrupt, SystemExit):
            status.stop()
            result = running.result()
            if result.rounds:
                display.result(result)
            where = ""
            if result.rounds or out is not None:
                (folder / "results.json").write_text(result.to_json())
                where = f", in {folder}"
            else:
                shutil.rmtree(folder)
            display.line(f"stopped; rounds that have ended: {len(result.rounds)}{where}")
            raise
        status.stop()
        (folder / "results.json").write_text(result.to_json())
        display.result(result)
        if markdown is not None:
            write_markdown(result, markdown)
    if result.failures:
        raise typer.Exit(1)
    if out is None:
        shutil.rmtree(folder)


def _lock(folder: Path, stack: contextlib.ExitStack) -> None:
    """Keeps other campaigns out of the folder: each removes the rounds of earlier ones."""
    descriptor = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ChaosError(
            f"another campaign is running in {folder}: pass another folder as --out"
        ) from None
    except OSError:
        return  # some network file systems lock no folders


@contextlib.contextmanager
def _ended_by_signals(tell: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and the end of the terminal end the block; `tell` is called then. The running
    jobs are ended too, which takes seconds: a second signal must not leave their processes behind.
    """
    ended = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended
        if ended:
            return
        ended = True
        tell()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in _ENDING}
    handled = [number for number in _ENDING if before[number] is not signal.SIG_IGN]  # nohup
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
