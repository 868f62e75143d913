"""The store that the agents serve to their workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from outlast.coordination.stores.tcp_client import TcpClient
from outlast.errors import StoreError

MakeRun = Callable[..., Any]
NET_S = 60.0


def client(joined: dict[str, Any]) -> TcpClient:
    """A client of the store server of a host."""
    return TcpClient("127.0.0.1", joined["store_port"], NET_S)


def test_workers_of_all_hosts_see_one_store_anew_in_each_attempt(run: MakeRun) -> None:
    here = run()
    hosts = [here.host(2), here.host(3)]
    joined = [host.joined() for host in hosts]
    one, other = (client(each) for each in joined)
    assert one.claim("who", b"one") == b"one"
    assert other.claim("who", b"other") == b"one"
    waited: list[bytes] = []
    waiting = threading.Thread(target=lambda: waited.append(other.wait_for("later", NET_S)))
    waiting.start()
    one.put("later", b"now")
    waiting.join()
    assert waited == [b"now"]
    # Workers do not see the keys of the agents, nor the agents those of the workers.
    hosts[0].ask("store", "put", "/who", "agent")
    assert one.read("who") == b"one"
    for host in hosts:
        host.ask("new_attempt", 1)
    for each in (one, other):
        with pytest.raises(StoreError, match="cannot be reached"):
            each.read("who")  # the connections are those of the attempt before
    assert one.read("who") is None
    assert other.claim("who", b"other") == b"other"
    one.close()
    other.close()


@pytest.mark.slow
def test_the_store_ends_with_the_lease(run: MakeRun) -> None:
    here = run(lease_s=2.0)
    hosts = [here.host(2), here.host(3)]
    joined = [host.joined() for host in hosts]
    hosts[0].ask("until", voters=2)
    worker = client(joined[1])
    worker.put("k", b"v")
    hosts[0].send(signal.SIGKILL)  # of two hosts, the second cannot go on alone
    with pytest.raises(StoreError, match=f"the store at 127.0.0.1:{joined[1]['store_port']}"):
        worker.wait_for("never", None)
    # The store may notice the end of the lease before the membership does.
    assert not hosts[1].ask("until", lease_ok=False)["lease_ok"]
    worker.close()
