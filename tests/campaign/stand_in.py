"""Campaigns whose rounds are run by the stand-in for `outlast run`, `launchers.py`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from campaign.launchers import COMMAND
from outlast.campaign import round
from outlast.campaign.campaign import Campaign
from outlast.campaign.results import Display
from outlast.campaign.round import Options


def use(monkeypatch: pytest.MonkeyPatch, training: str) -> None:
    """Rounds are run by this stand-in, with this training."""
    monkeypatch.setattr(round, "LAUNCHER", COMMAND)
    monkeypatch.setattr(round, "TRAINING", Path(training))


def campaign(**options: Any) -> tuple[Campaign, io.StringIO]:
    """A campaign with these options, and what it prints."""
    output = io.StringIO()
    console = Console(file=output, width=200)
    display = Display(console, console.status(""), None)
    return Campaign(Options(**options), display), output
