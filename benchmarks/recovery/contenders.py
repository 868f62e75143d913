"""The systems that are compared, and how each is started."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.lib.rank_processes import free_port

__all__ = ["CONTENDERS", "RANKS", "Contender"]

RANKS = 2
_SCRIPTS = Path(__file__).parent / "scripts"
_BIN = Path(sys.executable).parent

Command = tuple[list[str], dict[str, str]]
"""A command line, and the variables that it needs."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A system: its name in the tables, the package it needs, and its commands for one job."""

    name: str
    needs: str
    commands: Callable[[], list[Command]]

    @property
    def installed(self) -> bool:
        """Whether its package is installed."""
        return importlib.util.find_spec(self.needs) is not None

    @property
    def package(self) -> str:
        """The name and version of its package, which is installed."""
        return f"{self.needs.replace('_', '-')} {importlib.metadata.version(self.needs)}"


def _torchrun(script: str) -> Callable[[], list[Command]]:
    return lambda: [([*_elastic("torchrun"), str(_SCRIPTS / script)], {})]


def _elastic(launcher: str, ranks: int = RANKS) -> list[str]:
    return [
        str(_BIN / launcher),
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "--max-restarts=1000",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--monitor-interval=0.1",
    ]


def _outlast() -> list[Command]:
    run = [str(_BIN / "outlast"), "run", f"--nproc-per-node={RANKS}", "--max-restarts=1000"]
    leave = {"LEAVE": f"{_BIN / 'outlast'} drain --rank"}
    return [([*run, str(_SCRIPTS / "with_outlast.py")], leave)]


def _nvrx() -> list[Command]:
    return [([*_elastic("ft_launcher"), str(_SCRIPTS / "with_nvrx.py")], {})]


def _torchft() -> list[Command]:
    port = free_port()
    lighthouse = [
        str(_BIN / "torchft_lighthouse"),
        f"--bind=127.0.0.1:{port}",
        "--min_replicas=1",
        "--quorum_tick_ms=10",
        "--join_timeout_ms=5000",
        "--heartbeat_timeout_ms=300",
    ]
    commands: list[Command] = [(lighthouse, {"RUST_LOG": "error"})]
    for replica in range(RANKS):
        variables = {"REPLICA": str(replica), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        script = str(_SCRIPTS / "with_torchft.py")
        commands.append(([*_elastic("torchrun", 1), script], variables))
    return commands


CONTENDERS = (
    Contender("outlast", "outlast", _outlast),
    Contender("torchrun, torch.save", "torch", _torchrun("with_torch_save.py")),
    Contender("torchrun, DCP async_save", "torch", _torchrun("with_dcp.py")),
    Contender("nvidia-resiliency-ext", "nvidia_resiliency_ext", _nvrx),
    Contender("torchrun, lm-resiliency", "lm_resiliency", _torchrun("with_lm_resiliency.py")),
    Contender("torchft", "torchft", _torchft),
)


def environment(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """The variables of a contender's process."""
    return {
        **os.environ,
        "RECOVERY_FOLDER": str(folder),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **variables,
    }
