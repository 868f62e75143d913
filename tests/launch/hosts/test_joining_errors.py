"""Hosts that cannot join: each ends with an error that names host and setting."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.launch.hosts.replicated import connection, handshake, peer_connections
from procs import free_port

MakeRun = Callable[..., Any]
LIMIT_S = 0.8


@contextlib.contextmanager
def server(answer: bytes | None) -> Iterator[int]:
    """Another program that listens on 127.0.0.2; says `answer`, or nothing."""
    with socket.create_server(("127.0.0.2", 0)) as listener:
        accepted: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(listener.accept()[0])
                    if answer is not None:
                        accepted[-1].sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in accepted:
                each.close()


HTTP = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"


def test_endpoints_that_are_no_agents(run: MakeRun) -> None:
    here = run(lease_s=1.0)
    three = run(lease_s=1.0, endpoints=3)
    limit = {"join_limit_s": LIMIT_S}
    with server(HTTP) as http, server(None) as silent:
        host_http = here.host(3, endpoints=[("127.0.0.2", http)], **limit)
        host_silent = here.host(3, endpoints=[("127.0.0.2", silent)], **limit)
        host_none = here.host(3, **limit)
        host_name = here.host(3, endpoints=[("no-such-host.invalid", 29400)], join_limit_s=0.0)
        host_first = three.host(2, **limit)
        began = f"no group of run {here.run_id!r} within 0.8 s (--rdzv-endpoint): 127.0.0.2:"
        for host, port, reason in (
            (host_http, http, r"it is no outlast agent: it says b'HTTP/1.1 400 Bad Request\r"),
            (host_silent, silent, "it accepts connections but does not say what it is"),
            (host_none, here.endpoints[0][1], "connection refused"),
        ):
            assert host.failed().startswith(f"{began}{port}: {reason}")
    assert "no-such-host.invalid:29400: its name cannot be resolved" in host_name.failed()
    error = host_first.failed()
    port = three.endpoints[0][1]
    assert f"127.0.0.2:{port}: this host, too few other endpoints answer" in error
    assert f"127.0.0.3:{port}: connection refused" in error


def test_hosts_that_do_not_fit_are_refused(run: MakeRun) -> None:
    here = run()
    settings = [("torch", "2.13"), ("--nproc-per-node", "4"), ("outlast version", "1.0")]
    first = here.host(2, settings=settings)
    first.joined()
    name = socket.gethostname()
    misfits: dict[str, dict[str, Any]] = {
        f"torch differs between the hosts of this run: {name} has '2.13', {name} has '2.12'": {
            "settings": [("torch", "2.12"), ("--nproc-per-node", "8")]
        },
        f"--nproc-per-node differs between the hosts of this run: {name} has '4', {name} has '8'": {
            "settings": [("torch", "2.13"), ("--nproc-per-node", "8")]
        },
        "--nproc-per-node differs": {"settings": [("torch", "2.13")]},
        "--host-timeout differs": {"settings": settings, "lease_s": 7.0},
        f"--rdzv-id: {name} asks for the run 'another', and {name} was started for another one": {
            "settings": settings,
            "run_id": "another",
        },
        f"outlast version: {name} has 1.0, {name} has 2.0": {
            "settings": [*settings[:2], ("outlast version", "2.0")],
            "protocol": 1 << 16,
        },
    }
    hosts = [here.host(3 + i, **options) for i, options in enumerate(misfits.values())]
    for error, host in zip(misfits, hosts, strict=True):
        assert error in host.failed()
    # The group says so too, and takes others in.
    refused = first.ask("state")["refused"]
    assert len(refused) == len(misfits)
    assert all(any(error in line for line in refused) for error in misfits)
    here.host(10, settings=settings).joined()


@pytest.mark.slow
def test_a_wrong_run_id_on_one_endpoint_of_three_ends_that_one(run: MakeRun) -> None:
    here = run(endpoints=3)
    wrong = here.host(3, run_id="another")
    right = [here.host(2), here.host(4)]
    assert "was started for another one" in wrong.failed()
    for host in right:
        host.joined()
    fixed = here.host(3)  # what the others remember of that address does not keep it out
    fixed.joined()
    right[0].ask("until", hosts=["127.0.0.2", "127.0.0.3", "127.0.0.4"])


def test_names_that_cannot_be_resolved_are_named_soon() -> None:
    code = """
import socket, threading
from outlast.launch.hosts.replicated import group
from outlast.launch.hosts.host_group import GroupSpec
group._SAY_S, group._LOOK_S = 0.0, 0.01
slow = threading.Event()
def resolve(name, *args, **kwargs):
    slow.wait()
    raise socket.gaierror(socket.EAI_NONAME, f"no {name}")
socket.getaddrinfo = resolve
def say(line):
    print(line, flush=True)
    slow.set()
spec = dict(run_id="x", endpoints=(("h1", 1), ("h2", 1)), join_limit_s=0.5, say=say, page=None)
group.ReplicatedGroup(GroupSpec(**spec)).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first, second = done.stdout.splitlines()[:2]
    assert first == "waits for the addresses of h1, h2 (--rdzv-endpoint)"
    assert second.startswith("not in a group yet (--rdzv-endpoint): h1:1: its name cannot be")
    assert "h2:1: its name cannot be resolved" in second


@pytest.mark.slow
def test_two_agents_with_one_address(run: MakeRun) -> None:
    here = run(lease_s=1.0)
    here.start(2, 3)
    second = here.host(3)
    error = second.failed()
    assert "at 127.0.0.3 is already in this run" in error
    assert "--rdzv-id" in error


def test_strangers_are_dropped_and_harm_nothing(run: MakeRun) -> None:
    here = run(lease_s=2.0)
    host = here.host(2)
    host.joined()
    address = here.endpoints[0]
    silent = [socket.create_connection(address) for _ in range(peer_connections.MAX_STRANGERS + 9)]
    too_long = handshake.OPEN + (connection.STRANGER_BYTES + 1).to_bytes(4, "big")
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 100_000,
        handshake.OPEN + b"\0\0\0\x01J",
        handshake.OPEN + b"\0\0\0\x02R\xff",
        handshake.OPEN + b'\0\0\0\x10J["Hello",{"a":1}',
        too_long,
    ):
        with socket.create_connection(address) as stranger:
            with contextlib.suppress(OSError):  # dropped before all of it was sent
                stranger.sendall(garbage)
                stranger.shutdown(socket.SHUT_WR)
            _until_closed(stranger)
    for stranger in silent:
        _until_closed(stranger)
        stranger.close()
    assert host.ask("store", "add", "n", 1) == 1
    here.host(3).joined()


def _until_closed(stranger: socket.socket) -> None:
    stranger.settimeout(60.0)
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(4096):
            pass


def test_a_name_of_this_host_that_is_a_loopback_address(tmp_path: Path) -> None:
    code = """
import socket, sys
from pathlib import Path
known = socket.getaddrinfo
def resolve(host, port, **kwargs):
    return known("127.0.1.1" if host == "node1" else host, port, **kwargs)
socket.getaddrinfo = resolve
from outlast.launch.hosts.replicated.group import ReplicatedGroup
from outlast.launch.hosts.host_group import GroupSpec
from outlast.system.lease_page import LeasePage
page = LeasePage.create(Path(sys.argv[2]))
ReplicatedGroup(GroupSpec(run_id="x", endpoints=(("node1", int(sys.argv[1])),), page=page)).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(free_port()), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert "node1 resolves to the loopback address 127.0.1.1" in done.stderr
    assert done.returncode == 1
