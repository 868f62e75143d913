"""From the loss of a host to the first useful step: with copies, with storage, with torchrun.

Two ranks, each a "host" of its own. All processes of rank 1 that hold its state are killed; its
replacement starts at once on a third "host", with torch imported, as a standby process has it. The
time to detect the loss is not included: the monitor process of the killed rank reports it. With
torchrun, both workers are started again, and read the checkpoint from storage with
`torch.distributed.checkpoint`. Files are dropped from the page cache first.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.checkpoint.limits import drop_cache
from benchmarks.checkpoint.training_state import Size, Training
from benchmarks.copies.step_rate import RANKS, be_host
from benchmarks.lib.rank_processes import FOLDER, RankProcesses
from outlast.async_checkpoint import Checkpointer
from outlast.events.emitter import MemorySink
from outlast.events.types import CheckpointRestored, CopyCompleted
from outlast.inprocess import CallWrapper, Compose, Wrapper
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

__all__ = ["measure"]

_PATIENCE_S = 120.0
_HOLD = datetime.timedelta(seconds=60)


def measure(size: Size, rounds: int) -> dict[str, Any]:
    """Seconds until the first step after the restore, in each round; and of the restore itself."""
    print(f"copies: the loss of a host, {rounds} rounds", flush=True)
    found: dict[str, Any] = {}
    for _ in range(rounds):
        for name, replicas in (("copies", 1), ("storage", 0)):
            one = _outlast(size, replicas)
            assert one["source"] == name, one
            kept = found.setdefault(name, {"seconds": [], "restore": []})
            for what in kept:
                kept[what].append(one[what])
        found.setdefault("torchrun", {"seconds": []})["seconds"].append(_torchrun(size))
    return found


def _outlast(size: Size, replicas: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(dir=_folder(), prefix="loss-") as path,
        RankProcesses("copies-loss", RANKS) as processes,
    ):
        log = processes.folder / "said.log"
        train = functools.partial(_train, size, Path(path), replicas, log)
        processes.start_all(lambda slot: train(slot))
        ready = _await_lines(log, "ready", RANKS)
        drop_cache(list(Path(path).glob("step-*/*")))
        lost = time.monotonic()
        for pid in next(line["pids"] for line in ready if line["slot"] == 1):
            os.kill(pid, signal.SIGKILL)
        while 1 not in processes.ended(_PATIENCE_S):
            pass
        processes.start(1, functools.partial(train, 2))
        useful = _await_lines(log, "useful", RANKS)
        processes.wait_all(_PATIENCE_S)
    return {
        "seconds": max(line["at"] for line in useful) - lost,
        "restore": max(line["restore"] for line in useful),
        "source": useful[0]["source"],
    }


def _train(size: Size, path: Path, replicas: int, log: Path, host: int) -> None:
    be_host(host)
    say = functools.partial(_say, log, host)

    def body(call: CallWrapper) -> None:
        dist.init_process_group("gloo")
        job = Training(size, init_device_mesh("cpu", (RANKS,)))
        sink = MemorySink()
        checkpointer = Checkpointer(path, replicas=replicas, events=sink)
        step = checkpointer.restore(job.state_dict())
        job.train()
        if step is None:
            checkpointer.save(1, job.state_dict()).wait()
            while replicas and not any(isinstance(e, CopyCompleted) for e in sink.events):
                time.sleep(0.01)
            dist.barrier()
            session = checkpointer.session
            keeper = None if session.keeper is None else session.keeper.pid
            say("ready", pids=[p for p in (session.writer.pid, keeper, os.getpid()) if p])
            while True:
                job.train()
                dist.barrier()
        at = time.monotonic()
        restored = next(e for e in sink.events if isinstance(e, CheckpointRestored))
        say("useful", at=at, restore=restored.seconds, source=restored.source)
        dist.barrier()
        checkpointer.close()
        dist.barrier()
        dist.destroy_process_group()

    wrapper: Callable[[Any], Any] = Wrapper(
        rank_assignment=Compose(ShiftRanks(), AwaitReplacements(_HOLD))
    )
    body.__annotations__ = {"call": CallWrapper}
    wrapper(body)()


def _torchrun(size: Size) -> float:
    with tempfile.TemporaryDirectory(dir=_folder(), prefix="torchrun-") as path:
        log = Path(path) / "said.log"
        script = str(Path(__file__).with_name("torchrun_script.py"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", "--max-restarts=1", script]
        numbers = [str(n) for n in (size.dim, size.layers, size.vocabulary, size.tokens)]
        with subprocess.Popen(
            [*command, path, *numbers], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            ready = _await_lines(log, "ready", RANKS)
            drop_cache(list((Path(path) / "checkpoint").glob("*")))
            lost = time.monotonic()
            os.kill(next(line["pid"] for line in ready if line["slot"] == 1), signal.SIGKILL)
            useful = _await_lines(log, "useful", RANKS)
            if process.wait(_PATIENCE_S) != 0:
                raise RuntimeError(f"torchrun ended with exit code {process.returncode}")
    return float(max(line["at"] for line in useful) - lost)


def _folder() -> Path:
    folder = FOLDER.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _say(log: Path, slot: int, event: str, **fields: Any) -> None:
    line = json.dumps({"event": event, "slot": slot, **fields}) + "\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def _await_lines(log: Path, event: str, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + _PATIENCE_S
    text = ""
    while time.monotonic() < deadline:
        text = log.read_text() if log.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        found = [line for line in lines if line["event"] == event]
        if len(found) >= count:
            return found
        time.sleep(0.002)
    raise RuntimeError(f"{log} does not have {count} lines of {event!r}:\n{text}")
