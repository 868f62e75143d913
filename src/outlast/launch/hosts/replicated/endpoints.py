"""The addresses of this host and of the endpoints: which is this host, how others reach it."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import socket
from collections.abc import Sequence

from outlast.errors import LaunchError
from outlast.launch.hosts.replicated.peer_connections import Address
from outlast.system import sockets
from outlast.system.sockets import address_towards, is_loopback

_BACKLOG = 4096


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One endpoint of the command line. `address` is `None` while its name cannot be resolved."""

    host: str
    port: int
    address: Address | None
    problem: str = ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass
class Place:
    """Where this host listens: `own` is its index among the endpoints, -1 if it is none of them."""

    listener: socket.socket
    address: str
    port: int
    own: int


def resolve(host: str, port: int) -> Endpoint:
    """An endpoint with its address, or with the reason why it has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as e:
        return Endpoint(host, port, None, f"its name cannot be resolved: {e.strerror}")
    # IPv4 first: the order of getaddrinfo may differ between hosts.
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    address = str(found[0][4][0])
    return Endpoint(host, port, (address, port))


def listen(endpoints: Sequence[Endpoint], local_addr: str | None) -> Place:
    """Listen at this host's address, on an endpoint's port if this host is that endpoint. A
    `LaunchError` names the endpoint or the option that is wrong.
    """
    own = None if local_addr is None else own_address(local_addr)
    problems = []
    for index, endpoint in enumerate(endpoints):
        if endpoint.address is None:
            continue
        if own not in (None, endpoint.address[0]):
            continue
        listener = _listener(*endpoint.address)
        if isinstance(listener, socket.socket):
            _refuse_loopback(endpoint)
            return Place(listener, endpoint.address[0], endpoint.port, index)
        problems.append(listener)
    if own is None:
        own = facing(endpoints)
    listener = _listener(own, 0)
    if not isinstance(listener, socket.socket):
        raise LaunchError(f"this host cannot listen on its address {own}: {listener}")
    return Place(listener, own, listener.getsockname()[1], -1)


def own_address(local_addr: str) -> str:
    """The address that `--local-addr` means. A `LaunchError` if this host has no such address."""
    found = resolve(local_addr, 0)
    if found.address is None:
        raise LaunchError(f"--local-addr {local_addr}: {found.problem}")
    probe = _listener(found.address[0], 0)
    if not isinstance(probe, socket.socket):
        raise LaunchError(f"--local-addr {local_addr}: not an address of this host: {probe}")
    probe.close()
    return found.address[0]


def _refuse_loopback(endpoint: Endpoint) -> None:
    """A host's own name often resolves to a loopback address on that host, by a line of
    `/etc/hosts`; other hosts see another address, where nothing would listen.
    """
    assert endpoint.address is not None
    name = endpoint.host
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return
    if name != "localhost" and is_loopback(endpoint.address[0]):
        raise LaunchError(
            f"--rdzv-endpoint {endpoint}: on this host ({socket.gethostname()}), {name} resolves "
            f"to the loopback address {endpoint.address[0]}, which other hosts cannot reach: "
            "correct /etc/hosts, or give the endpoint by its address"
        )


def facing(endpoints: Sequence[Endpoint]) -> str:
    """The address of this host that faces the first endpoint to which there is a route."""
    problem = "no endpoint"
    for endpoint in endpoints:
        problem = f"{endpoint}: {endpoint.problem}"
        if endpoint.address is None:
            continue
        try:
            return address_towards(endpoint.address)
        except OSError as e:
            problem = f"{endpoint}: {e.strerror}"
    raise LaunchError(
        f"this host ({socket.gethostname()}) has no route to any endpoint: {problem}; "
        "see --rdzv-endpoint and --local-addr"
    )


def _listener(address: str, port: int) -> socket.socket | str:
    try:
        return sockets.listen(address, port, _BACKLOG)
    except OSError as e:
        return os.strerror(e.errno) if e.errno else str(e)
