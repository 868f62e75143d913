"""How every command ends on an error that is not a wrong usage: one line, and exit code 1, or 74 if
a checkpoint could not be read: then it is not known what is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from outlast.errors import CheckpointReadError

UNREAD = 74
"""The exit code for a read error: EX_IOERR of sysexits.h."""


@contextmanager
def exit_on(*kinds: type[Exception]) -> Iterator[None]:
    """Turns an exception of these kinds into one line on standard error, and an exit code."""
    try:
        yield
    except kinds as e:
        typer.echo(f"outlast: error: {e}", err=True)
        raise typer.Exit(UNREAD if isinstance(e, CheckpointReadError) else 1) from e
