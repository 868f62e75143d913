"""A check of neighbors with devices: two on each of two hosts, so four ranks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from launch.hosts.neighbor_pair import PAIR, Pair
from outlast.launch.hosts.plan import JobPlan, Stage

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "kind"), [(Stage.FORMING, "late:2"), (Stage.RUNNING, "cpu:1")])
def test_devices_take_part_unless_ranks_have_them(
    monkeypatch: pytest.MonkeyPatch, stage: Stage, kind: str
) -> None:
    paths = os.pathsep.join(map(str, (HERE.parent, HERE / "plugin")))
    monkeypatch.setenv("PYTHONPATH", paths)
    with contextlib.closing(Pair()) as pair:
        pair.check(JobPlan(hosts={host.id: host for host in PAIR}, stage=stage))
        assert pair.reports() == {"a": {}, "b": {}}
        assert pair.hosts[0].take_figures().endswith(f" ({kind})")
