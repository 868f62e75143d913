"""Campaigns whose rounds are run by the stand-in for `outlast run`, `launchers.py`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from campaign.launchers import COMMAND
from outlast.campaign import job, programs, round
from outlast.campaign.campaign import Campaign
from outlast.campaign.options import Options
from outlast.campaign.results import Display


def use(
    monkeypatch: pytest.MonkeyPatch, training: str, *, linger_s: float = 1.0, stall_s: float = 60.0
) -> None:
    """Rounds are run by this stand-in, with this training."""
    monkeypatch.setattr(job, "LINGER_S", linger_s)
    monkeypatch.setattr(programs, "_OWN_STALL_S", stall_s)
    monkeypatch.setattr(round, "LAUNCHER", COMMAND)
    monkeypatch.setattr(round, "TRAINING", Path(training))


def campaign(folder: Path, **options: Any) -> tuple[Campaign, io.StringIO]:
    """A campaign with these options, and what it prints."""
    output = io.StringIO()
    console = Console(file=output, width=200)
    display = Display(console, console.status(""))
    return Campaign(Options(**{"jobs": 1, **options}), folder, display), output
