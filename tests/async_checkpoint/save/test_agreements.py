"""An exception of one rank in its part of an agreement is an error on all ranks, at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from procs import Job

Ranks = Callable[..., Job]

# For each point: the rank that raises, and what the others say of it.
POINTS = {
    "identity": (0, "UnicodeDecodeError"),
    "lock": (0, "RuntimeError: no lock"),
    "session": (1, "ModuleNotFoundError: no module"),
    "left": (1, "KeyError: 'taken'"),
    "interrupt": (1, "KeyboardInterrupt"),
    "snapshots": (1, "RuntimeError: held"),
    "candidates": (0, "ValueError: listed"),
    "observer": (1, "KeyboardInterrupt"),
    "manifest": (0, "RecursionError: deep"),
    "fit": (1, "ZeroDivisionError: fits"),
    "load": (1, "MemoryError: full"),
    "newest": (0, "RuntimeError: newest"),
    "trust": (0, "UnicodeDecodeError"),
    "items": (1, "KeyboardInterrupt"),
    "plans": (0, "RuntimeError: plans"),
    "snapshot": (1, "SystemExit: 3"),
    "write": (1, "RuntimeError: write"),
    "commit": (0, "UnicodeDecodeError"),
    "background": (0, "RuntimeError: unchanged"),
}


def check(ranks: Ranks, path: Path, *points: str) -> None:
    with ranks("leaves", "leaves", str(path), *points) as job:
        job.start_all()
        codes = job.wait_all()
        assert set(codes.values()) == {0}, job.errors(0) + job.errors(1)
        lines = {
            (rank, line["point"]): line
            for rank in range(2)
            for line in job.lines(rank)
            if line["event"] in ("raised", "returned")
        }
    for point in points:
        rank, cause = POINTS[point]
        there, here = lines[1 - rank, point], lines[rank, point]
        assert there["event"] == here["event"] == "raised", point
        assert there["type"] == "CheckpointError", there
        assert f"rank {rank}" in there["message"], there
        assert cause in there["message"], there


@pytest.mark.slow
def test_what_one_rank_raises_reaches_all(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, tmp_path, "identity", "snapshots", "commit")


@pytest.mark.slow
def test_at_every_agreement(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, tmp_path, *POINTS)
