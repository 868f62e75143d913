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

import typer

from outlast.campaign.options import Options
from outlast.errors import ChaosError, OutlastError
from outlast.launch.commands.shared import exit_on, with_options_of

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(help="Inject faults, and check what they do.", no_args_is_help=True)
    # A group of one command would otherwise become that command.
    group.callback()(lambda: None)
    group.command("campaign")(with_options_of(Options, campaign))
    app.add_typer(group, name="chaos")


def campaign(options: Options) -> None:
    """Train through planned faults, and compare each loss and the final weights, bit by bit, with
    an undisturbed run; of a script, every tensor of its last checkpoints. The exit code is 1 if
    anything differs or is left over.
    """
    from rich.console import Console

    from outlast.campaign.campaign import Campaign
    from outlast.campaign.plan import RoundPlan
    from outlast.campaign.results import Display, write_markdown

    console = Console()
    with exit_on(OutlastError, OSError), contextlib.ExitStack() as stack:
        plan = None if options.replay is None else RoundPlan.load(options.replay)
        folder = options.out or Path(tempfile.mkdtemp(prefix="outlast-campaign-"))
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder, stack)
        status = stack.enter_context(console.status("starting"))
        stack.enter_context(_ended_by_signals(lambda: status.update("ending the running jobs")))
        display = Display(console, status)
        try:
            running = Campaign(options, folder, display)
        except ValueError as e:
            raise typer.BadParameter(str(e), param_hint="--kinds") from e
        if plan is not None and options.replay is not None:
            place = running.folder_of(plan)
            if options.replay.resolve().is_relative_to(place.resolve()):
                raise ChaosError(
                    f"{options.replay} is in {place}, which this run would replace: pass another "
                    "folder as --out"
                )
        try:
            result = running.run() if plan is None else running.replay(plan)
        except (KeyboardInterrupt, SystemExit):
            status.stop()
            result = running.result()
            if result.rounds:
                display.result(result)
            where = ""
            if result.rounds or options.out is not None:
                (folder / "results.json").write_text(result.to_json())
                where = f", in {folder}"
            else:
                shutil.rmtree(folder)
            display.line(f"stopped; rounds that have ended: {len(result.rounds)}{where}")
            raise
        status.stop()
        (folder / "results.json").write_text(result.to_json())
        display.result(result)
        if options.markdown is not None:
            write_markdown(result, options.markdown)
    if result.failures:
        raise typer.Exit(1)
    if options.out is None:
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
