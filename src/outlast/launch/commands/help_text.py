"""The help of the commands, made from the docstrings of their functions."""

from __future__ import annotations

import inspect

import typer


def fold_help(app: typer.Typer) -> None:
    """Join the lines of each paragraph, because the help would keep the line breaks of the source;
    a list of commands shows the first sentence.
    """
    for command in app.registered_commands:
        text = inspect.getdoc(command.callback) or ""
        paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
        command.help = "\n\n".join(paragraphs)
        command.short_help = paragraphs[0].partition(". ")[0].partition(": ")[0].rstrip(".") + "."
    for group in app.registered_groups:
        if group.typer_instance is not None:
            fold_help(group.typer_instance)
