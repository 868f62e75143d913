"""Rank 0 is stopped in the middle of a commit, and its job goes on without it, on another host."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint.storage.directory import list_checkpoints, open_storage, survey
from outlast.async_checkpoint.storage.fence import newest
from outlast.system import lease_page
from outlast.system.lease_page import LeasePage
from procs import NET_S, Job, marked

Ranks = Callable[..., Job]
LONG_S = 10_000.0


class Hosts:
    """The hosts of one job: each has a lease page, and a rank 0 at a position of the job."""

    def __init__(self, ranks: Ranks, folder: Path, stack: ExitStack) -> None:
        self._ranks = ranks
        self._folder = folder
        self._stack = stack
        self.pages: list[LeasePage] = []

    def rank_0(self, scenario: str, *args: str, iteration: int, run: str = "run") -> Job:
        """Starts rank 0 of an iteration, on a new host that holds a lease."""
        page = LeasePage.create(self._folder)
        self._stack.callback(page.close)
        page.renew(lease_page.now() + LONG_S)
        self.pages.append(page)
        env = {
            "OUTLAST_RUN": run,
            "OUTLAST_FENCE": str(page.path),
            "OUTLAST_ITERATION": f"0.0.{iteration}",
        }
        job = self._stack.enter_context(self._ranks("fenced", scenario, *args, nprocs=1, env=env))
        job.start_all()
        return job


@pytest.fixture
def hosts(ranks: Ranks, tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(ranks, tmp_path, stack)


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def line(job: Job, event: str) -> dict[str, Any]:
    return job.wait_for_line(0, lambda said: said["event"] == event)


def ends(job: Job) -> None:
    assert job.wait(0) == 0, job.errors(0)


def states(url: str) -> dict[str, str]:
    """What each directory is, as `outlast checkpoint ls` shows it."""
    return {one.folder: one.wrong.partition(",")[0] for one in survey(open_storage(url))}


def check_restored(hosts: Hosts, url: str) -> None:
    """The next iteration restores what the second host has saved."""
    job = hosts.rank_0("third", url, iteration=2)
    ends(job)
    restored = [(said["step"], said["right"]) for said in job.lines(0)]
    assert restored == [(4, True), (3, True)]


def test_stopped_right_before_the_rename(hosts: Hosts, tmp_path: Path) -> None:
    path, plan = str(tmp_path / "c"), Plan(tmp_path / "plan")
    first = hosts.rank_0("first", path, str(plan.folder), iteration=0)
    writer = plan.gate().arrived()
    with stopped(first.pid(0), writer):
        # The folder's lock is held by a process that cannot release it.
        second = hosts.rank_0("second", path, iteration=1)
        assert line(second, "restored") == {"event": "restored", "step": 2, "right": True}
        ends(second)
        plan.set()
    plan.gate().open()
    assert "the save of step 3 was not committed" in line(first, "raised")["message"]
    ends(first)
    check_restored(hosts, path)


def in_place(tmp_path: Path) -> str:
    """A storage without rename, as an object store is."""
    pytest.importorskip("fsspec")
    (tmp_path / "c").mkdir()
    return f"local://{tmp_path / 'c'}"


def as_object_store(plan: Plan, path: Path) -> None:
    """An object store has no directories: a removed one is no obstacle to a later upload."""
    for note in plan.notes():
        if note["op"] == "make":
            (path / note["folder"]).mkdir(exist_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("lease", [True, False])
def test_a_process_that_wakes_up_commits_nothing(hosts: Hosts, tmp_path: Path, lease: bool) -> None:
    url, plan = in_place(tmp_path), Plan(tmp_path / "plan")
    first = hosts.rank_0("first", url, str(plan.folder), ".metadata", iteration=0)
    writer = plan.gate().arrived()
    with stopped(first.pid(0), writer):
        ends(hosts.rank_0("second", url, iteration=1))
        plan.set()
        as_object_store(plan, tmp_path / "c")
    if not lease:
        hosts.pages[0].renew(lease_page.now() - 3.0)
    plan.gate().open()
    message = line(first, "raised")["message"]
    text = "the job has gone on without this process" if lease else "its lease ended 3."
    assert text in message
    assert os.uname().nodename in message
    ends(first)
    check_restored(hosts, url)


@pytest.mark.slow
def test_a_commit_after_all_is_not_believed(hosts: Hosts, tmp_path: Path) -> None:
    """The first process is stopped between the check and the commit: here, it cannot be refused."""
    url, plan = in_place(tmp_path), Plan(tmp_path / "plan")
    first = hosts.rank_0("first", url, str(plan.folder), iteration=0)
    writer = plan.gate().arrived()
    with stopped(first.pid(0), writer):
        ends(hosts.rank_0("second", url, iteration=1))
        as_object_store(plan, tmp_path / "c")
        # It ends right after its commit, so that it cannot take it back.
        plan.set({"op": "put", "name": "manifest.json", "when": "after", "do": "kill"})
        first.kill(0)
    plan.gate().open()
    psutil.wait_procs(marked(first.id), timeout=NET_S)
    storage = open_storage(url)
    (folder,) = [folder for folder, state in states(url).items() if state == "stale"]
    assert folder.startswith("step-00000003-")
    assert [info.step for info in list_checkpoints(storage)] == [1, 2, 3, 4]
    check_restored(hosts, url)
    assert folder not in states(url)  # removed by the next that opened the folder


@pytest.mark.slow
def test_another_job_is_kept_out(hosts: Hosts, tmp_path: Path) -> None:
    path, plan = str(tmp_path / "c"), Plan(tmp_path / "plan")
    first = hosts.rank_0("first", path, str(plan.folder), iteration=5)
    plan.gate().arrived()
    for run, iteration in (("other", 6), ("run", 5), ("run", 4)):
        job = hosts.rank_0("opens", path, iteration=iteration, run=run)
        assert line(job, "raised")["type"] == "FolderInUse"
        ends(job)
    plan.set()
    plan.gate().open()
    assert line(first, "returned")
    ends(first)


def test_no_fence_on_one_host(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    with ranks("fenced", "opens", path, nprocs=1) as job:
        job.start_all()
        assert line(job, "opened")
        ends(job)
    assert newest(open_storage(path)) is None
