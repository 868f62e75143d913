"""`outlast drain` with `--rdzv-backend c10d`: asks the hosts of a job, as none of them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from outlast.coordination.replicated.hosts import HostInfo
from outlast.errors import LaunchError
from outlast.launch.config.secret import Secret
from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.replicated.endpoints import resolve
from outlast.launch.hosts.replicated.messages import PROTOCOL, Drain, Drained, Hello, Message
from outlast.launch.hosts.replicated.peer_connections import Peer, PeerConnections
from outlast.system.sockets import listen

_ASK_S, _PATIENCE_S = 0.5, 3.0


def ask(
    run_id: str,
    endpoints: Sequence[tuple[str, int]],
    secret: Secret | None,
    request: Drain,
    limit_s: float,
) -> Sequence[str]:
    """Asks the hosts at the endpoints; returns what the first to answer has said. A `LaunchError`
    if the request is wrong, or if none answers.
    """
    me = HostInfo(id=f"drain-{secrets.token_hex(6)}", name="outlast drain")
    answers: list[Drained] = []

    def receive(_: Peer, message: Message) -> None:
        if isinstance(message, Drained):
            answers.append(message)

    with EventLoop() as loop, listen("127.0.0.1") as listener:
        peers = PeerConnections(
            loop, Hello(PROTOCOL, run_id, me), listener, _PATIENCE_S, receive, print, secret
        )
        found = [resolve(host, port) for host, port in endpoints]
        addresses = [each.address for each in found if each.address is not None]
        deadline, at = loop.clock.now() + limit_s, 0.0
        while not answers and (now := loop.clock.now()) < deadline:
            if now >= at:
                # One after another: each would pass the request on.
                for address in addresses:
                    peers.send_to(address, request)
                at = now + _ASK_S
                loop.call_later(_ASK_S, lambda: None)
            loop.run_once()
        problems = [f"{each}: {each.problem}" for each in found if each.address is None]
        problems += [f"{a[0]}:{a[1]}: {peers.failure(a) or 'no answer'}" for a in addresses]
        peers.close()
    if not answers:
        raise LaunchError(f"no host of run {run_id!r} has answered: {'; '.join(problems)}")
    if answers[0].problem:
        raise LaunchError(answers[0].problem)
    return answers[0].lines
