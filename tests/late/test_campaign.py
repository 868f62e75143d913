"""A campaign of faults with the training on the device, which torch finds as it finds other
devices: by an entry point (`plugin`).

    LATE_DELAYS=1:300 PYTHONPATH=tests:tests/late/plugin outlast chaos campaign --device late \
        --nproc-per-node 2 --faults 200
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from late import device

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_faults_change_nothing(tmp_path: Path) -> None:
    paths = os.pathsep.join(map(str, (HERE.parent, HERE / "plugin")))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "outlast.launch", "chaos", "campaign", "--device", "late"),
            *("--nproc-per-node", "2", "--faults", "6", "--seed", "3", "--jobs", "1"),
            *("--kinds", "exception,sigkill,hang_collective,kill_monitor", "--no-shrink"),
            *("--out", str(tmp_path / "out")),
        ],
        env={**os.environ, "PYTHONPATH": paths, device.DELAYS: "1:300"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical" in done.stdout
