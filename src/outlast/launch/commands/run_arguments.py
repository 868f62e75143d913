"""The arguments that say which run a command reads: `DIR` and `--run ID`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunDirectory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="The directory given to `outlast run --events-dir`, or the folder of a run in it.",
    ),
]

RunName = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="ID",
        help="Which run: its id, or the name of its folder in DIR. Default: the newest.",
        show_default=False,
    ),
]
