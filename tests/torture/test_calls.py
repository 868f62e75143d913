"""The record of the calls has all that the kernel was asked; checked with strace."""

from __future__ import annotations

import collections
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torture.calls import preloaded, why_not
from torture.runner import TESTS

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(not shutil.which("strace"), reason="there is no strace"),
    pytest.mark.slow,
]

KINDS = {
    "write": "write", "writev": "write", "sendfile": "write", "copy_file_range": "copy",
    "pwrite64": "write", "pwritev": "write", "pwritev2": "write",
    "fsync": "fsync", "fdatasync": "fsync", "ftruncate": "truncate", "fallocate": "fallocate",
    "rename": "rename", "renameat": "rename", "renameat2": "rename",
    "unlink": "unlink", "unlinkat": "unlink", "rmdir": "unlink",
    "mkdir": "mkdir", "mkdirat": "mkdir", "link": "link", "linkat": "link",
}  # fmt: skip

PROGRAM = """
from pathlib import Path
from random import Random
from torture.calls import Calls, initialize
from torture.subjects.checkpointer import recycled_files
from torture.subjects.elastic_states import RegisteredStates
initialize()
calls = Calls.attached()
calls.record()
for subject in (recycled_files(Random(1)), RegisteredStates()):
    folder = calls.root / subject.name
    subject.prepare(folder, Random(1))
    subject.run(folder, calls)
for call in calls.stop():
    print(call.kind)
"""


@pytest.mark.exhaustive
def test_no_call_is_missed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with preloaded(root) as env:
        env["PYTHONPATH"] = os.pathsep.join([str(TESTS), env.get("PYTHONPATH", "")])
        trace = ["strace", "-f", "-y", "-s", "0", "-o", str(tmp_path / "trace")]
        trace += ["-e", f"trace={','.join(KINDS)}"]
        preload = f"LD_PRELOAD={env.pop('LD_PRELOAD')}"  # not for strace itself
        done = subprocess.run(
            [*trace, "-E", preload, sys.executable, "-c", PROGRAM],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
    alias = {"pwrite": "write", "rmdir": "unlink"}
    recorded = collections.Counter(alias.get(k, k) for k in done.stdout.split())
    asked: collections.Counter[str] = collections.Counter()
    for line in (tmp_path / "trace").read_text().splitlines():
        found = re.match(r"\d+ +(\w+)\((.*)", line)
        if found and found[1] in KINDS and str(root) in found[2]:
            asked[KINDS[found[1]]] += 1
    assert asked["write"] > 5
    assert {kind: recorded[kind] for kind in asked} == dict(asked)
