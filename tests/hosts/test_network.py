"""Hosts in network namespaces: what is lost, what arrives, and that nothing is left over."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

from host import Host, HostProcess
from network import Network

ECHO = """
import socket
listener = socket.create_server(("", 5000))
print("listening", flush=True)
connection, (peer, _) = listener.accept()
print(peer, flush=True)
while data := connection.recv(100):
    print("got", data.decode(), flush=True)
    connection.sendall(b"answer")
print("closed", flush=True)
"""
CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
print("connected", flush=True)
for line in sys.stdin:
    connection.sendall(line.strip().encode())
    print("answered", connection.recv(100).decode(), flush=True)
"""
NET_S = 20.0


def start(host: Host, program: str, *args: str, stdin: int = subprocess.DEVNULL) -> HostProcess:
    command = [sys.executable, "-S", "-u", "-c", program, *args]
    return host.start(command, stdin=stdin, stdout=subprocess.PIPE)


def line(process: HostProcess, timeout: float = NET_S) -> str:
    """Its next line; an empty string if it has closed its output, or says nothing so long."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout)[0]:
        return ""
    return process.stdout.readline().decode().strip()


def end(*processes: HostProcess) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class Talk:
    """A connection from h1 to h2."""

    def __init__(self, network: Network) -> None:
        self.server = start(network["h2"], ECHO)
        assert line(self.server) == "listening"
        read, self.to_client = os.pipe()
        self.client = start(network["h1"], CLIENT, "h2", stdin=read)
        os.close(read)
        assert line(self.client) == "connected"
        assert line(self.server) == network.address("h1")

    def say(self, word: str) -> None:
        os.write(self.to_client, f"{word}\n".encode())

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.to_client)
        end(self.server, self.client)


def test_a_cut_of_one_direction_loses_what_is_sent_there_until_it_is_healed(
    network: Network,
) -> None:
    with Talk(network) as talk:
        talk.say("one")
        assert line(talk.server) == "got one"
        assert line(talk.client) == "answered answer"
        network.cut("h1", "h2")
        talk.say("two")
        assert not line(talk.server, 0.5)
        network.heal()
        assert line(talk.server) == "got two"  # TCP sends it again
        assert line(talk.client) == "answered answer"
        network.cut("h2", "h1")
        talk.say("three")
        assert line(talk.server) == "got three"
        assert not line(talk.client, 0.5)


def test_isolated_hosts_do_not_hear_an_error_and_other_hosts_still_talk(network: Network) -> None:
    network.isolate("h3")
    with Talk(network) as talk:  # h1 and h2
        client = start(network["h3"], CLIENT, "h2")
        assert not line(client, 0.5)
        assert client.poll() is None  # it waits: no answer, and no error either
        end(client)
        talk.say("one")
        assert line(talk.client) == "answered answer"


def test_a_host_that_loses_power_says_nothing_to_its_peers(network: Network) -> None:
    with Talk(network) as talk:
        network["h1"].power_off()
        assert talk.client.wait() == -signal.SIGKILL
        assert network["h1"].pids() == []
        assert not line(talk.server, 0.5)  # the connection was not closed
        network.boot("h1")
        client = start(network["h1"], CLIENT, "h2")
        assert line(client) == "connected"  # in the listener's backlog, from the same address
        end(client)


def test_a_frozen_host_continues_where_it_was(network: Network) -> None:
    with Talk(network) as talk:
        network["h2"].freeze()
        talk.say("one")
        assert not line(talk.server, 0.3)
        network["h2"].thaw()
        assert line(talk.server) == "got one"
        talk.server.send_signal(signal.SIGSTOP)
        talk.say("two")
        assert not line(talk.server, 0.3)
        talk.server.send_signal(signal.SIGCONT)
        assert line(talk.server) == "got two"


WHO = """
import os, socket, time
print(socket.gethostname(), os.getpid() < 100, int(time.monotonic()), os.listdir("/dev/shm"))
"""


def test_each_host_has_its_own_name_processes_memory_and_clock(network: Network) -> None:
    clocks = []
    for name in ("h1", "h2"):
        who = start(network[name], WHO)
        found = re.fullmatch(rf"{name} True (\d+) \[\]", line(who))
        assert found
        clocks.append(int(found[1]) - network[name].clock_offset_s)
        end(who)
    assert network["h1"].clock_offset_s != network["h2"].clock_offset_s
    assert abs(clocks[1] - clocks[0]) < 60


KILLED = """
import os, signal, subprocess, sys
from network import Network
with Network(["h1", "h2"]) as network:
    host = network["h1"]
    sleeper = host.start(["sleep", "1000"])
    print(host.init, sleeper.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_hosts_whose_program_is_killed(network: Network, tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples" / "hosts"
    command = [sys.executable, "-c", KILLED]
    env = {**os.environ, "PYTHONPATH": str(examples), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        descriptors = []
        for pid in pids:
            try:
                descriptors.append(os.pidfd_open(pid))
            except ProcessLookupError:
                continue
    assert program.returncode == -signal.SIGKILL
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], NET_S)[0]
        os.close(descriptor)
