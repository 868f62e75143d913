"""What commands share: which run is read, options as a dataclass, errors, and help texts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from outlast.errors import CheckpointReadError

T = TypeVar("T")

UNREAD = 74
"""The exit code for a read error: EX_IOERR of sysexits.h."""

UNFIT = 69
"""The exit code of a launcher whose host must not run ranks: EX_UNAVAILABLE of sysexits.h."""

RunDirectory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="The directory given to `outlast run --events-dir`, or the folder of a run in it; or "
        "the folder of the checkpoints of a job without that option.",
    ),
]

RunName = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="ID",
        help="Which run: its id, or the name of its folder in DIR. Default: the newest that is "
        "running, or else the newest.",
        show_default=False,
    ),
]


@contextmanager
def exit_on(*kinds: type[Exception], code: int | None = None) -> Iterator[None]:
    """Turns an exception of these kinds into one line on standard error and an exit code: `code`,
    or by default 1, and 74 if a checkpoint could not be read: then it is not known what is in it.
    """
    try:
        yield
    except kinds as e:
        typer.echo(f"outlast: error: {e}", err=True)
        raise typer.Exit(code or (UNREAD if isinstance(e, CheckpointReadError) else 1)) from e


def fold_help(app: typer.Typer) -> None:
    """Join the lines of each paragraph of a docstring, because the help would keep the line breaks
    of the source; a list of commands shows the first sentence.
    """
    for command in app.registered_commands:
        text = inspect.getdoc(command.callback) or ""
        paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
        command.help = "\n\n".join(paragraphs)
        command.short_help = paragraphs[0].partition(". ")[0].partition(": ")[0].rstrip(".") + "."
    for group in app.registered_groups:
        if group.typer_instance is not None:
            fold_help(group.typer_instance)


def with_options_of(options: type[T], function: Callable[[T], None]) -> Any:
    """`function(options)` as a command with one parameter for each field of `options`."""

    def command(**values: Any) -> None:
        function(options(**values))

    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=(
                inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            ),
        )
        for field in dataclasses.fields(options)  # type: ignore[arg-type]
    ]
    command.__doc__ = function.__doc__
    command.__annotations__ = hints
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command
