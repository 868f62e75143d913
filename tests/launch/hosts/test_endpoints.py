"""Several endpoints: any of them may found the group, and the death of one is survived."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

import pytest

from procs import NET_S

MakeRun = Callable[..., Any]
EVERYONE = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


def test_three_endpoints_that_start_at_once_found_one_group(run: MakeRun) -> None:
    here = run(endpoints=3)
    hosts = [here.host(number, silence_s=0.3) for number in (2, 3, 4, 5)]
    for host in hosts:
        host.joined()
    for host in hosts:
        state = host.ask("until", hosts=[*EVERYONE, "127.0.0.5"])
        assert state["leader"] == "127.0.0.2"  # the first endpoint, as it was there


@pytest.mark.slow
def test_two_of_three_endpoints_are_enough(run: MakeRun) -> None:
    here = run(endpoints=3)
    second, third = here.host(3, silence_s=0.3), here.host(4, silence_s=0.3)
    second.joined()
    third.joined()
    late = here.host(2)
    late.joined()
    assert late.ask("until", hosts=EVERYONE)["leader"] in EVERYONE[1:]


def test_two_groups_with_one_run_id_do_not_last(run: MakeRun) -> None:
    here = run()
    port = here.endpoints[0][1]
    addresses = ["127.0.0.2", "127.0.0.3"]
    # Each is the first endpoint of its own list, and founds a group before it hears of the other.
    hosts = [
        here.host(2, endpoints=[(address, port) for address in addresses]),
        here.host(3, endpoints=[(address, port) for address in reversed(addresses)]),
    ]
    for host in hosts:
        host.joined()
        host.begin("until", lease_ok=False)
    (readable, *_), _, _ = select.select([host.process.stdout for host in hosts], [], [], NET_S)
    (loser,) = [host for host in hosts if host.process.stdout is readable]
    (winner,) = [host for host in hosts if host is not loser]
    assert "another group with this run id" in loser.answer()["error"]
    loser.close()
    assert not select.select([winner.process.stdout], [], [], 1.0)[0]
