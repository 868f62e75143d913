"""Our flags and torchrun's agree, by torchrun's own parser."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import typer
from torch.distributed.run import get_args_parser

from outlast.launch.cli import app
from outlast.launch.config.options import RunOptions

FLAGS: dict[str, argparse.Action] = {
    max(action.option_strings, key=len).replace("_", "-"): action
    for action in get_args_parser()._actions
    if action.option_strings and action.dest != "help"
}
# torchrun's defaults where ours is None, and options whose meaning differs: see the help of each
# option.
NOT_GIVEN = {
    "max_restarts": 0,
    "redirects": "0",
    "tee": "0",
    "local_ranks_filter": "",
    "run_id": "none",
    "rdzv_endpoint": "",
    "master_addr": "127.0.0.1",
}
OURS_ALONE = {"nnodes": None, "master_port": 0, "grace": 30.0}


def our_flags() -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each long flag of `outlast run`: its field, and all its spellings."""
    commands = typer.main.get_command(app)
    run = commands.get_command(None, "run")  # type: ignore[attr-defined]
    return {
        flag: (parameter.name, tuple(parameter.opts))
        for parameter in run.params
        for flag in parameter.opts
        if flag.startswith("--")
    }


def test_flags_of_the_same_name_have_the_same_default_and_short_name() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(RunOptions)}
    ours = our_flags()
    common = set(ours) & set(FLAGS)
    assert len(common) > 15
    for flag in common:
        field, spellings = ours[flag]
        action = FLAGS[flag]
        assert {s for s in action.option_strings if len(s) == 2} <= set(spellings), flag
        if field in OURS_ALONE:
            assert defaults[field] == OURS_ALONE[field]
        elif defaults[field] is None:
            assert action.default == NOT_GIVEN.get(field), flag
        else:
            assert action.default == defaults[field], flag


def test_the_docs_list_the_flags_of_torchrun_that_are_not_accepted() -> None:
    page = (Path(__file__).parents[3] / "docs" / "launcher.md").read_text()
    (sentence,) = re.findall(r"variables are not read\. (.*?) are not accepted\.", page, re.S)
    listed = set(re.findall(r"--[a-z-]+", sentence))
    missing = set(FLAGS) - set(our_flags())
    # An older torch may lack a flag of the list; it has none that the list lacks.
    assert missing <= listed
    assert not listed & set(our_flags())
