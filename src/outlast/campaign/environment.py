"""The environment variables of a campaign; the only module of it that reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

MARK = "OUTLAST_CAMPAIGN"
"""Set in every process of a round, with a value of its own for each job: it finds orphans."""


def job_environment(mark: str, temporary: Path, fired: Path) -> Mapping[str, str]:
    """The environment of the launcher of one job.

    Args:
        mark: identifies the processes of the job.
        temporary: the folder of its temporary files, which must be empty in the end.
        fired: where the job records which faults have fired.
    """
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")},
        MARK: mark,
        "TMPDIR": str(temporary),
        "OUTLAST_CHAOS_STATE": str(fired),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
