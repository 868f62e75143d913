"""The options of `outlast chaos campaign`. Imports nothing slow: the command line shows them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments and options, as typed."""

    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT ARGUMENT...]",
            help="A script that trains with Job, and saves to a relative folder, or to one below "
            "'{folder}' in an argument. Default: a training of the campaign's own.",
        ),
    ] = None
    faults: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many faults to fire. Default: 1000, of a script 20; no limit with --seconds.",
        ),
    ] = None
    seconds: Annotated[
        float | None, typer.Option(min=1, help="End after about this time.", show_default=False)
    ] = None
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the plans and the training.")] = 0
    ranks: Annotated[int, typer.Option("--nproc-per-node", min=1, help="Ranks of each job.")] = 4
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="TYPE", help="Where the campaign's own training computes: cuda, ..."
        ),
    ] = "cpu"
    kinds: Annotated[
        str, typer.Option(metavar="KIND,...", help="Only these kinds. Default: all.")
    ] = ""
    per_round: Annotated[
        int, typer.Option("--faults-per-round", min=1, help="Faults in one job.")
    ] = 40
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rounds at the same time. Default: the number of cores, at most 8."
        ),
    ] = None
    standby: Annotated[int, typer.Option(min=0, help="Standby processes of each job.")] = 2
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write results.json, and keep failed rounds. Default: a new temporary folder.",
        ),
    ] = None
    replay: Annotated[
        Path | None, typer.Option("--replay", metavar="FILE", help="Run the plan of one round.")
    ] = None
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep the folders of all rounds, not only of failed ones."),
    ] = False
    shrink: Annotated[
        bool, typer.Option("--shrink/--no-shrink", help="Shorten the plans of failed rounds.")
    ] = True
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the table there too; if the file is a page with the lines "
            "'<!-- campaign: begin -->' and '<!-- campaign: end -->', between them.",
        ),
    ] = None
