"""`outlast drain --rank`: what reaches the launcher's socket, from any user of the machine."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.errors import LaunchError
from outlast.launch.agent.rank_requests import RankRequests, ask
from outlast.launch.event_loop import EventLoop


def test_what_is_no_request_does_not_end_the_launcher() -> None:
    asked: list[tuple[int, str]] = []

    def move(rank: int, reason: str) -> str:
        asked.append((rank, reason))
        return "not now"

    job: Any = SimpleNamespace(run_id="run", mark=f"test-{os.getpid()}")
    name = f"\0outlast-requests-{job.mark}"
    with EventLoop() as loop, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        requests = RankRequests(job, loop, move)
        try:
            client.sendto(b"[]", name)  # without a name of its own: there is nobody to answer
            loop.run_once()
            client.bind("")
            for data in (b"", b"\xff", b'{"rank": 1}', b'{"run_id": "", "rank": "x"}'):
                client.sendto(data, name)
                loop.run_once()
                assert client.recv(1000).startswith(b"no request to move a rank: ")
            assert not asked
            data = b'{"run_id": "run", "rank": 1, "reason": "leaks"}'
            client.sendto(data, name)
            loop.run_once()
            assert client.recv(1000) == b"not now"
            assert asked == [(1, "leaks")]
        finally:
            requests.close()


@pytest.mark.parametrize(
    ("run_id", "error"),
    [
        ("b", "^rank 7 is not here$"),
        ("c", "^run 'c' does not run on this machine; those that do: (a, b|b, a)$"),
    ],
)
def test_only_the_run_that_is_meant_says_why_it_does_not_move_a_rank(
    run_id: str, error: str
) -> None:
    jobs: list[Any] = [
        SimpleNamespace(run_id=run, mark=f"test-{run}-{os.getpid()}") for run in ("a", "b")
    ]
    with EventLoop() as loop, ThreadPoolExecutor(1) as pool:
        ends = [RankRequests(job, loop, lambda rank, _: f"rank {rank} is not here") for job in jobs]
        try:
            asked = pool.submit(ask, run_id, 7, "", 60.0)
            asked.add_done_callback(lambda _: loop.call_from_thread(lambda: None))
            while not asked.done():
                loop.run_once()
            with pytest.raises(LaunchError, match=error):
                asked.result()
        finally:
            for end in ends:
                end.close()


def test_a_run_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchError, match="run 'another' does not run on this machine"):
        ask("another", 0, "", 1.0)
