"""The sockets of this process, as `/proc/self/fd` lists them; where it listens, and its address for
other hosts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

_FDS = "/proc/self/fd"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
# By machine, the numbers of the system calls poll, or ppoll, and recvfrom. A wait with a time limit
# in which a signal came that nobody handles, as at the end of a child process, goes on as
# restart_syscall, with the same arguments.
RESTARTED = {"x86_64": b"219", "aarch64": b"128"}.get(os.uname().machine, b"none")
_POLLS, _RECEIVES = {
    "x86_64": ((b"7", b"271", RESTARTED), b"45"),
    "aarch64": ((b"73", RESTARTED), b"207"),
}.get(os.uname().machine, ((), b"none"))


@contextlib.contextmanager
def unix_address(path: Path) -> Iterator[str]:
    """A short address of the Unix socket at `path`, which may exceed the kernel's 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"{_FDS}/{folder}/{path.name}"
    finally:
        os.close(folder)


def process_at(connection: socket.socket) -> tuple[int, int]:
    """The ids of the process at the other end of a Unix socket, and of its user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def listen(address: str, port: int = 0, backlog: int = 1024) -> socket.socket:
    """Listens at an address of this host; by default, at a port that the system chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """The connections to it, until `stop`."""
    with contextlib.suppress(OSError):  # closed
        while True:
            yield listener.accept()[0]


def stop(listener: socket.socket) -> None:
    """Closes it; a thread that waits for a connection goes on."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def epoll_descriptors() -> list[int]:
    """The epoll instances of this process."""
    found = []
    for name in os.listdir(_FDS):
        try:
            # Most descriptors are sockets or devices, and their links take longer to read.
            kind = stat.S_IFMT(os.fstat(int(name)).st_mode)
            if kind in (stat.S_IFSOCK, stat.S_IFIFO, stat.S_IFCHR):
                continue
            if os.readlink(f"{_FDS}/{name}") == "anon_inode:[eventpoll]":
                found.append(int(name))
        except OSError:
            continue  # closed meanwhile
    return found


def socket_inode(descriptor: int) -> int | None:
    """The inode of a socket, which no other socket has; `None` for any other descriptor."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def socket_inodes() -> dict[int, int]:
    """All sockets of this process: inode by descriptor."""
    inodes = ((int(name), socket_inode(int(name))) for name in os.listdir(_FDS))
    return {descriptor: inode for descriptor, inode in inodes if inode is not None}


def peer(descriptor: int) -> tuple[str, int] | None:
    """The peer's address and port; `None` if the socket has no peer, or the peer has no port."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            address = connection.getpeername()
    except OSError:
        return None
    if not isinstance(address, tuple):
        return None
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def awaited(thread: int) -> int | None:
    """The descriptor from which this thread of the process waits to receive, by its native id."""
    try:
        with open(f"/proc/self/task/{thread}/syscall", "rb", buffering=0) as file:
            call, *arguments = file.read().split()
        if call == _RECEIVES:
            return int(arguments[0], 16)
        if call not in _POLLS or int(arguments[1], 16) != 1:
            return None
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            (descriptor,) = struct.unpack("=i", os.pread(memory.fileno(), 4, int(arguments[0], 16)))
            return int(descriptor)
    except (OSError, OverflowError, struct.error):
        return None  # it runs, has ended, or waits for something else


def shut_down(descriptor: int, inode: int) -> bool:
    """Shuts a connection down, if the descriptor is still the socket `inode`; returns whether. The
    descriptor is duplicated first: if its owner closes it now, the duplicate is still the same
    socket, and no other file that gets its number is touched.
    """
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return False
    with socket.socket(fileno=duplicate) as connection:
        if socket_inode(duplicate) != inode:
            return False
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # no longer connected
    return True


def replace_tcp_sockets() -> None:
    """Replaces every TCP socket, except the standard streams, by the null device: for a child of a
    fork. The numbers stay taken, so no new file gets that of a connection which objects still hold.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in socket_inodes():
        if descriptor <= 2:
            continue
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            network = copy.family in (socket.AF_INET, socket.AF_INET6)
            tcp = network and copy.type == socket.SOCK_STREAM
        if tcp:
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def is_loopback(address: str) -> bool:
    """Whether only this host itself can reach `address`."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_towards(endpoint: tuple[str, int] | None) -> str:
    """The address of this host that faces `endpoint`; without one, that of the host's name."""
    if endpoint is None:
        return socket.gethostbyname(socket.gethostname())
    found = socket.getaddrinfo(endpoint[0], endpoint[1], type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    if is_loopback(address):
        return address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, endpoint[1] or 1))  # for a datagram socket, this sends nothing
        return str(probe.getsockname()[0])
