"""The proof that both sides of a connection know the secret of the job, and who does not get in."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch.config.secret import Secret, read_secret
from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.replicated import connection, handshake, peer_connections
from outlast.launch.hosts.replicated.connection import Connection
from outlast.launch.hosts.replicated.messages import (
    PROTOCOL,
    Find,
    Hello,
    Message,
    Replicated,
)
from outlast.launch.hosts.replicated.past import Past

MakeRun = Callable[..., Any]
TOKEN, OTHER = "the secret of this job", "the secret of another job"
RIGHT, WRONG = Secret(TOKEN.encode()), Secret(OTHER.encode())
NONCE_BYTES = PROOF_BYTES = 32


class Side:
    """One end of a connection, and what it got."""

    def __init__(self, loop: EventLoop, sock: socket.socket, secret: Any, dials: bool) -> None:
        sock.setblocking(False)
        self.got: list[Message] = []
        self.closed: list[str] = []
        self.connection = Connection(
            loop,
            sock,
            lambda _, message: self.got.append(message),
            lambda _, why: self.closed.append(why),
            secret,
            dials=dials,
        )


class Wire:
    """A dialer and a listener, and between them someone who sees and may change all bytes."""

    def __init__(self, loop: EventLoop, dialer: Secret | None, listener: Secret | None) -> None:
        self._loop = loop
        a, self.to_dialer = socket.socketpair()
        b, self.to_listener = socket.socketpair()
        self.dialer, self.listener = Side(loop, a, dialer, True), Side(loop, b, listener, False)
        self.from_dialer, self.from_listener = bytearray(), bytearray()
        for end in (self.to_dialer, self.to_listener):
            end.setblocking(False)

    def run(self) -> None:
        """Both sides do what they can, and what they have sent arrives here."""
        for _ in range(8):
            self._loop.call_later(0.0, lambda: None)
            self._loop.run_once()
        for end, into in (
            (self.to_dialer, self.from_dialer),
            (self.to_listener, self.from_listener),
        ):
            with contextlib.suppress(BlockingIOError):
                while data := end.recv(1 << 20):
                    into += data

    def pass_on(self, at_once: int = 1 << 20) -> None:
        """Everything reaches the other side, in pieces of this size, until nothing is left."""
        self.run()
        while self.from_dialer or self.from_listener:
            for data, end in (
                (self.from_dialer, self.to_listener),
                (self.from_listener, self.to_dialer),
            ):
                with contextlib.suppress(BrokenPipeError):
                    end.sendall(bytes(data[:at_once]))
                del data[:at_once]
            self.run()


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    made: list[Wire] = []
    with EventLoop() as loop:

        def make(dialer: Secret | None = RIGHT, listener: Secret | None = RIGHT) -> Wire:
            made.append(Wire(loop, dialer, listener))
            return made[-1]

        yield make
        for each in made:
            each.dialer.connection.close()
            each.listener.connection.close()
            each.to_dialer.close()
            each.to_listener.close()


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("secret", [RIGHT, None])
def test_messages_pass_between_two_that_know_the_secret(
    wire: Callable[..., Wire], secret: Secret | None, at_once: int
) -> None:
    it = wire(secret, secret)
    asked, answered = Find(Past()), Replicated("g", "h", b"x" * (3 * connection.PART_BYTES))
    it.dialer.connection.limit = connection.FRAME_BYTES
    it.dialer.connection.send(asked)  # before the handshake: it waits for its end
    it.pass_on(at_once)
    assert it.listener.got == [asked]
    it.listener.connection.send(answered)
    it.listener.connection.send(asked)
    it.pass_on(at_once if at_once > 1 else 1 << 12)
    assert sorted(it.dialer.got, key=repr) == sorted([answered, asked], key=repr)
    assert not it.dialer.closed + it.listener.closed


@pytest.mark.parametrize(
    ("dialer", "listener", "to_dialer", "to_listener"),
    [
        (WRONG, RIGHT, "differs from that of this host", "differs from that of this host"),
        (None, RIGHT, "it uses a secret, and this host has none", "it uses no secret"),
        (RIGHT, None, "it uses no secret", "it uses a secret, and this host has none"),
    ],
)
def test_both_sides_say_what_is_wrong(
    wire: Callable[..., Wire],
    dialer: Secret | None,
    listener: Secret | None,
    to_dialer: str,
    to_listener: str,
) -> None:
    it = wire(dialer, listener)
    it.dialer.connection.send(Find(Past()))
    it.pass_on()
    for end in (it.to_dialer, it.to_listener):
        end.shutdown(socket.SHUT_WR)
    it.run()
    for side, said in ((it.dialer, to_dialer), (it.listener, to_listener)):
        assert said in side.connection.not_proved
        assert "OUTLAST_TOKEN or --token-file" in side.connection.not_proved
        assert side.got == []
        assert not side.connection.is_open


def stranger_of(it: Wire) -> Callable[[bytes], bytes]:
    """Sends to the listener in the place of the dialer; returns what it says."""

    def say(data: bytes) -> bytes:
        it.to_listener.sendall(data)
        it.from_listener.clear()
        it.run()
        return bytes(it.from_listener)

    return say


def test_a_recorded_proof_is_of_no_use_later(wire: Callable[..., Wire]) -> None:
    first = wire()
    first.run()
    begin, challenge = bytes(first.from_dialer), bytes(first.from_listener)
    first.to_dialer.sendall(challenge)
    first.run()
    recorded = bytes(first.from_dialer[len(begin) :])
    assert len(recorded) == PROOF_BYTES
    say = stranger_of(second := wire())
    second.run()
    assert say(begin) == b""
    assert say(recorded) == bytes(PROOF_BYTES)  # which no proof is
    assert "differs" in second.listener.connection.not_proved
    # The same proof, in its own connection, is right.
    say = stranger_of(first)
    say(begin)
    assert say(recorded) not in (b"", bytes(PROOF_BYTES))
    assert not first.listener.connection.not_proved


def test_a_host_that_gets_its_own_bytes_back_refuses_them(wire: Callable[..., Wire]) -> None:
    it = wire()
    for _ in range(2):  # its nonce, then its proof
        it.run()
        it.to_dialer.sendall(bytes(it.from_dialer))
        it.from_dialer.clear()
    it.run()
    assert "differs" in it.dialer.connection.not_proved


def test_a_listener_gives_nothing_to_a_dialer_without_the_secret(wire: Callable[..., Wire]) -> None:
    it = wire()
    it.run()
    assert len(it.from_listener) == len(handshake.SECRET) + NONCE_BYTES
    assert stranger_of(it)(handshake.SECRET + bytes(NONCE_BYTES)) == b""


def test_a_listener_keeps_no_more_than_the_handshake(wire: Callable[..., Wire]) -> None:
    it = wire()
    it.run()
    it.to_listener.sendall(handshake.SECRET + bytes(NONCE_BYTES + PROOF_BYTES) + b"x" * 50_000)
    for _ in range(200):
        it.run()
        assert len(it.listener.connection._received) <= handshake.FIRST_BYTES
    assert it.listener.connection.not_proved


@pytest.mark.parametrize("at", [2, 30, -1])  # in the length, the contents, the tag
def test_a_changed_frame_ends_the_connection(wire: Callable[..., Wire], at: int) -> None:
    it = wire()
    it.pass_on()
    it.dialer.connection.send(Replicated("g", "h", b"x" * 100))
    it.run()
    it.from_dialer[at] ^= 1
    it.pass_on()
    if it.listener.connection.is_open:  # a longer length: the rest comes with the next frame
        it.dialer.connection.send(Replicated("g", "h", b"x" * 1000))
        it.pass_on()
    assert it.listener.closed == ["a message was changed on the way"]
    assert it.listener.got == []


@pytest.mark.parametrize("change", ["repeated", "swapped", "reflected"])
def test_frames_count_once_in_their_order_and_direction(
    wire: Callable[..., Wire], change: str
) -> None:
    it = wire()
    it.pass_on()
    frames = []
    for data in (b"1", b"2"):
        it.dialer.connection.send(Replicated("g", "h", data))
        it.run()
        frames.append(bytes(it.from_dialer))
        it.from_dialer.clear()
    if change == "reflected":
        it.to_dialer.sendall(frames[0])
        it.run()
        assert it.dialer.closed == ["a message was changed on the way"]
        return
    it.to_listener.sendall(b"".join(frames[:1] * 2 if change == "repeated" else frames[::-1]))
    it.run()
    assert it.listener.closed == ["a message was changed on the way"]
    assert len(it.listener.got) == (1 if change == "repeated" else 0)


# ---------------------------------------------------------------------------- the secret itself
def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    for mode in (0o644, 0o640, 0o620):
        file.chmod(mode)
        with pytest.raises(ValueError, match=f"other users have access to it .*chmod 600 {file}"):
            read_secret("", file)
    file.chmod(0o600)
    secret = read_secret(OTHER, file)  # the option counts, not the environment
    assert secret is not None
    assert secret.derive("p", b"a") == RIGHT.derive("p", b"a")
    assert TOKEN not in repr(secret)
    with pytest.raises(ValueError, match="No such file"):
        read_secret("", tmp_path / "none")


@pytest.mark.parametrize("token", ["short", " " * 40])
def test_a_secret_that_can_be_guessed_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match=re.escape("openssl rand -hex 32")):
        read_secret(token, None)


def test_what_is_derived_depends_on_every_part() -> None:
    derived = [
        RIGHT.derive("p", b"a", b"b"),
        RIGHT.derive("p", b"ab"),
        RIGHT.derive("pa", b"b"),
        RIGHT.derive("p", b"a", b"b", b""),
        WRONG.derive("p", b"a", b"b"),
    ]
    assert len(set(derived)) == len(derived)


# --------------------------------------------------------------------------------- real hosts
def test_a_group_takes_only_hosts_with_its_secret(run: MakeRun) -> None:
    here = run()
    first = here.host(2, secret=TOKEN)
    first.joined()
    where = f"127.0.0.2:{here.endpoints[0][1]}"
    errors = [here.host(3, secret=OTHER).failed(), here.host(4).failed()]
    assert f"{where}: its secret (OUTLAST_TOKEN or --token-file) differs" in errors[0]
    assert f"{where}: it uses a secret, and this host has none" in errors[1]
    here.host(5, secret=TOKEN).joined()
    refused = " ".join(first.ask("state")["refused"])
    assert "refused a connection from 127.0.0.3: its secret" in refused
    assert "refused a connection from 127.0.0.4: it uses no secret" in refused
    assert first.ask("store", "add", "n", 1) == 1


@pytest.mark.slow
def test_an_endpoint_with_another_secret_ends_and_the_others_go_on(run: MakeRun) -> None:
    here = run(endpoints=3)
    wrong = here.host(2, secret=OTHER)  # the first endpoint, which founds the group otherwise
    others = [here.host(number, secret=TOKEN) for number in (3, 4)]
    assert "differs from that of this host" in wrong.failed()
    for host in others:
        host.joined()


@pytest.mark.slow
def test_strangers_hold_little_memory_and_do_not_keep_hosts_out(run: MakeRun) -> None:
    here = run(lease_s=4.0)
    host = here.host(2, secret=TOKEN)
    host.joined()
    begin = handshake.SECRET + bytes(NONCE_BYTES)
    many = 4 * peer_connections.MAX_STRANGERS
    with contextlib.ExitStack() as stack:
        before = rss_bytes(host.process.pid)
        for number in range(many):
            stranger = stack.enter_context(
                socket.create_connection(here.endpoints[0], source_address=("127.0.0.9", 0))
            )
            stranger.setblocking(False)
            with contextlib.suppress(OSError):  # dropped already, or its buffer is full
                stranger.sendall((begin[: number % 41], begin + b"\xff" * (1 << 22))[number % 2])
        assert host.ask("state")["lease_ok"]
        here.host(3, secret=TOKEN).joined()
        assert rss_bytes(host.process.pid) - before < 8 << 20
    assert host.ask("store", "add", "n", 1) == 1


def test_a_program_that_opens_many_connections_does_not_push_out_others() -> None:
    me = HostInfo(id="h", name="h", address="127.0.0.1", port=1)
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(EventLoop())
        listener = socket.create_server(("127.0.0.1", 0))
        nothing: Any = lambda *_: None  # noqa: E731
        peers = peer_connections.PeerConnections(
            loop, Hello(PROTOCOL, "r", me), listener, 600.0, nothing, nothing, RIGHT
        )
        stack.callback(peers.close)
        where = listener.getsockname()

        def open_from(address: str) -> socket.socket:
            opened = socket.create_connection(where, source_address=(address, 0))
            opened.setblocking(False)
            for _ in range(2):
                loop.call_later(0.0, lambda: None)
                loop.run_once()
            return stack.enter_context(opened)

        slow = open_from("127.0.0.8")
        many = [open_from("127.0.0.9") for _ in range(2 * peer_connections.MAX_STRANGERS)]
        size = len(handshake.SECRET) + NONCE_BYTES
        assert len(slow.recv(100)) == len(many[0].recv(100)) == size
        assert many[0].recv(1) == b""  # the oldest of them yielded
        with pytest.raises(BlockingIOError):
            slow.recv(1)
        assert len(peers._strangers) == peer_connections.MAX_STRANGERS


def rss_bytes(pid: int) -> int:
    """The memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) << 10
