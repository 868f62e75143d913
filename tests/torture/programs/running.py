"""Runs a program with `outlast run`, again after each stop, until it ends; and what it has left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from procs import MARKER, marked

STOPPED = 143
NET_S = 400.0
"""How long one launcher may run: a program takes seconds."""
_LINGER_S = 15.0
_MOST_RUNS = 12

Fault = dict[str, Any]
Values = dict[tuple[str, str, int], list[Any]]


@dataclasses.dataclass
class Run:
    """What a program has done: each launcher's exit code and output, and what was recorded; `wrong`
    are faults that every run must not have.
    """

    folder: Path
    codes: list[int] = dataclasses.field(default_factory=list)
    output: str = ""
    wrong: list[str] = dataclasses.field(default_factory=list)

    @property
    def fired(self) -> int:
        """How many of the planned faults have come."""
        return len(list((self.folder / "fired").iterdir()))

    @property
    def values(self) -> Values:
        """All values that were recorded, by kind, key and rank, in the order of each process."""
        found: Values = defaultdict(list)
        for path in sorted((self.folder / "records").iterdir()):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # else its process was killed in the write
                    kind, key, rank, value = json.loads(line)
                    found[kind, key, rank].append(value)
        return found

    def file(self, name: str) -> bytes | None:
        """The content of a file that the program has written; `None` without it."""
        path = self.folder / name
        return path.read_bytes() if path.exists() else None


def run(text: str, ranks: int, folder: Path, faults: list[Fault], chaos: list[Fault]) -> Run:
    """Runs the program in a new folder: through these faults of its own, and through those of
    `outlast run --chaos`.
    """
    for name in ("records", "fired"):
        (folder / name).mkdir(parents=True)
    script = folder / "program.py"
    script.write_text(text)
    shutil.copy(Path(__file__).with_name("kit.py"), folder)
    (folder / "chaos.json").write_text(json.dumps({"faults": chaos}))
    (folder / "chaos-fired").mkdir(mode=0o700)
    found = Run(folder)
    while len(found.codes) < _MOST_RUNS:
        code = _launch(found, script, ranks, faults, bool(chaos))
        if code != STOPPED:
            break
    return found


def _launch(found: Run, script: Path, ranks: int, faults: list[Fault], with_chaos: bool) -> int:
    """One launcher, to its end."""
    folder, mark = found.folder, uuid.uuid4().hex
    # Short, because the path of a Unix socket is limited.
    temporary = Path(tempfile.mkdtemp(prefix="prog-"))
    command = [sys.executable, "-m", "outlast.launch", "run", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=1000"]
    command += [f"--chaos={folder / 'chaos.json'}"] if with_chaos else []
    env = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")}
    env |= {
        MARKER: mark,
        "OMP_NUM_THREADS": "1",
        "OUTLAST_CHAOS_STATE": str(folder / "chaos-fired"),
        "PROGRAM_CHECKPOINTS": str(folder / "checkpoints"),
        "PROGRAM_FAULTS": json.dumps(faults),
        "PROGRAM_OUT": str(folder),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(temporary),
    }
    try:
        with (folder / f"log-{len(found.codes)}").open("wb") as log:
            process = subprocess.Popen(
                [*command, str(script)], cwd=folder, env=env, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                code = process.wait(NET_S)
            except subprocess.TimeoutExpired:
                found.wrong.append(f"it was still running after {NET_S:g} s")
                process.kill()
                code = process.wait()
        found.wrong += _left_behind(mark, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    found.output += (folder / f"log-{len(found.codes)}").read_text(errors="replace")
    found.codes.append(code)
    return code


def _left_behind(mark: str, temporary: Path) -> list[str]:
    """Processes and temporary files of a launcher that has ended; ends the processes."""
    psutil.wait_procs(marked(mark), timeout=_LINGER_S)
    found = []
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            found.append(f"a process was left behind: {process.pid} {process.cmdline()}")
            process.kill()
    # torch's own: the folder that torch.compile has made.
    theirs = ("torchinductor", "torch_compile", "pymp-")
    found += [
        f"a temporary file was left behind: {path.relative_to(temporary)}"
        for path in sorted(temporary.rglob("*"))
        if not path.is_dir() and not path.relative_to(temporary).parts[0].startswith(theirs)
    ]
    return found
