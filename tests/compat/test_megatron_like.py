"""A program written for nvidia-resiliency-ext 0.4, on real ranks with faults."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from procs import Job, free_port


def test_the_composition_of_megatron_survives_an_exception_and_a_kill(
    ranks: Callable[..., Job],
) -> None:
    ports = [str(free_port()), str(free_port())]
    with ranks("megatron_like", "train", *ports, nprocs=3) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: -signal.SIGKILL, 2: 0}, job.errors(0)
    lines: dict[int, list[dict[str, Any]]] = {rank: job.lines(rank) for rank in range(3)}
    entered = {
        rank: [(x["iteration"], x["rank"], x["size"]) for x in found if x["event"] == "entered"]
        for rank, found in lines.items()
    }
    # The reserve rank takes the place of the killed one.
    assert entered == {
        0: [(0, 0, 2), (1, 0, 2), (2, 0, 2)],
        1: [(0, 1, 2), (1, 1, 2)],
        2: [(2, 1, 2)],
    }
    for rank in (0, 2):
        assert lines[rank][-1] == {"event": "returned", "value": 2}
        assert [x["event"] for x in lines[rank]].count("forgotten") == 2
        ended = [x["iteration"] for x in lines[rank] if x["event"] == "writers ended"]
        assert ended == [0, 1]
    told = [x for x in job.errors(0).splitlines() if x.startswith("[NestedRestarter]")]
    assert [line.partition("state=")[2] for line in told] == [
        "initialize",
        "handling stage=starting",
        "handling stage=completed",
        "handling stage=starting",
        "handling stage=completed",
        "finalized",
    ]
    assert "[NestedRestarter]" not in job.errors(2)
