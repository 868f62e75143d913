"""What the scripts of all systems share: the model, the data, the planned faults, a log of steps.

The harness gives a folder in `RECOVERY_FOLDER`, with the plan in `plan.json`. Each process appends
to `said.log` there, one JSON object a line: `step` (a step is complete), `fault` (a planned one is
about to happen). Times are monotonic, and so comparable between the processes of this host.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

FEATURES, HIDDEN, BATCH = 256, 1024, 64


class Run:
    """One process of a contender. `rank` is its place in the job, for the data and the faults."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.folder = Path(os.environ["RECOVERY_FOLDER"])
        self.rank = rank
        plan = json.loads((self.folder / "plan.json").read_text())
        self.faults: list[dict[str, Any]] = plan["faults"]
        self.every: int = plan["every"]
        self._log = os.open(
            self.folder / "said.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        )
        self._started = self.folder / "started"
        self._training_since = math.inf

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def model(self) -> nn.Module:
        """2.4 million parameters; with Adam's moments, a state of 28 MiB."""
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(FEATURES, HIDDEN), nn.ReLU()]
        for _ in range(2):
            layers += [nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(HIDDEN, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adam, over all parameters."""
        return torch.optim.Adam(model.parameters(), lr=1e-4)

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """The loss of this rank's batch of `step`; a fault that is due happens before it."""
        self._fail_if_due()
        generator = torch.Generator().manual_seed(step * 1009 + self.rank)
        inputs = torch.randn(BATCH, FEATURES, generator=generator)
        return nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))

    def completed(self, step: int) -> None:
        """Notes that `step` is complete on this rank."""
        if not self._started.exists():
            temporary = self._started.with_suffix(f".{self.rank}")
            temporary.write_text(str(time.monotonic()))
            temporary.replace(self._started)  # never read half written
        self._say("step", step=step)

    def _fail_if_due(self) -> None:
        if not self._started.exists():
            return
        began = float(self._started.read_text())
        now = time.monotonic()
        self._training_since = min(self._training_since, now)
        for number, fault in enumerate(self.faults):
            due = began + fault["at"]
            if fault["rank"] != self.rank or due > now or not self._claim(number):
                continue
            if due < self._training_since:
                continue  # missed: this rank was down, and there was nothing to kill
            self._say("fault", number=number, kind=fault["kind"])
            if fault["kind"] == "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault["kind"] == "hang":
                time.sleep(10**6)
            if fault["kind"] == "leave":
                self._leave()
                continue
            raise RuntimeError(f"planned fault {number}")

    def _leave(self) -> None:
        """This rank's place is needed: the system is told to move it, or, if it has no such order,
        its process gets the signal that a scheduler sends.
        """
        order = os.environ.get("LEAVE")
        if order is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            subprocess.Popen([*order.split(), str(self.rank)], stdout=subprocess.DEVNULL)

    def _claim(self, number: int) -> bool:
        """Whether this is the first time that this fault is looked at when it is due."""
        try:
            os.close(os.open(self.folder / f"fault-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _say(self, event: str, **fields: Any) -> None:
        line = {"event": event, "at": time.monotonic(), "rank": self.rank, **fields}
        os.write(self._log, json.dumps(line).encode() + b"\n")


def time_limit(name: str) -> dict[str, Any]:
    """An argument with this name, if the plan has hangs: how long a rank, or a collective, may make
    no progress. Otherwise each system has its own default.
    """
    found = os.environ.get("HANG_S")
    return {} if found is None else {name: datetime.timedelta(seconds=float(found))}


def launched_rank() -> int:
    """The rank that the launcher gave to this process."""
    return int(os.environ["RANK"])


def group_store() -> Any:
    """A store for the process group with keys of this attempt only. With torchrun's default, a
    restarted rank 0 was seen to connect to the address of a rank of the attempt before.
    """
    import torch.distributed as dist

    kinds: Any = dist
    agent = kinds.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return kinds.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), agent)
