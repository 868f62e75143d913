"""How every command ends on an error that is not a wrong usage: one line, and exit code 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def exit_on(*kinds: type[Exception]) -> Iterator[None]:
    """Turns an exception of these kinds into one line on standard error and exit code 1."""
    try:
        yield
    except kinds as e:
        typer.echo(f"outlast: error: {e}", err=True)
        raise typer.Exit(1) from e
