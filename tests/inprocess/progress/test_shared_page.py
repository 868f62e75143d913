"""The shared page: its fields do not overlap, and a forked child reads and writes them."""

from __future__ import annotations

import os
import warnings

from outlast.inprocess.monitor.shared_page import Activity, SharedPage
from outlast.metrics.progress_page import read_progress

INTS = ("activity", "iteration", "member", "rank", "pings", "killed_hard", "reported_soft")
FLOATS = ("progress", "soft_limit", "long_limit")


def test_nothing_is_known_at_first(page: SharedPage) -> None:
    assert page.activity == Activity.WAITING
    assert [page.iteration, page.member, page.rank, page.reported_soft] == [-1] * 4
    assert [page.pings, page.killed_hard, *(getattr(page, name) for name in FLOATS)] == [0] * 5


def test_no_field_shares_its_word(page: SharedPage) -> None:
    values = {name: (1 << 40) + n for n, name in enumerate(INTS)}
    values |= {name: n + 0.5 for n, name in enumerate(FLOATS)}
    for name, value in values.items():
        setattr(page, name, value)
    assert {name: getattr(page, name) for name in values} == values


def test_a_forked_child_shares_it(page: SharedPage) -> None:
    page.iteration = 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, from 3.12 on
        pid = os.fork()
    if pid == 0:
        page.reported_soft = page.iteration
        os._exit(0)
    os.waitpid(pid, 0)
    assert page.reported_soft == 7


def test_closed_it_is_found_by_nobody_but_a_thread_may_still_write_to_it() -> None:
    page = SharedPage()
    page.pings = 1
    assert read_progress(os.getpid()) is not None
    page.close()
    assert read_progress(os.getpid()) is None
    page.pings += 1
    assert page.pings == 2
