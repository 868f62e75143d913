"""One endpoint of etcd: requests and streams over HTTP or HTTPS; why an endpoint is of no use."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_LARGEST_LINE = 256 * 2**20
OLDEST = (3, 4)
"""The first version of etcd whose gateway serves the paths that are used here."""
_STALLS_MENDED = {(3, 4): 31, (3, 5): 13}
"""From which patch on a leader whose disk has stalled harms no lease (etcd-io/etcd 15247)."""
_IF_FULL = ": compact and defragment it, then `etcdctl alarm disarm` (docs/launcher.md)"


@dataclass(frozen=True)
class Endpoint:
    """Host and port of a member of etcd's cluster."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Security:
    """How to connect and as which user. Without any of these: plain HTTP, no authentication.

    Attributes:
        cacert: a file of the certificates that sign the server's; "" for those of the system.
        cert: a file with the client's certificate, for an etcd that asks for one; with `key`.
        user: a user of etcd; with `password`.
        tls: whether to use TLS; the files above imply it.
    """

    cacert: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""
    tls: bool = False

    def __repr__(self) -> str:
        return f"Security(tls={self.uses_tls}, user={self.user!r})"  # without the password

    @property
    def uses_tls(self) -> bool:
        return self.tls or bool(self.cacert or self.cert)

    def context(self) -> ssl.SSLContext | None:
        """The settings of TLS, `None` for plain HTTP; an `OSError` for a file that is no PEM."""
        if not self.uses_tls:
            return None
        context = ssl.create_default_context(cafile=self.cacert or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key or None)
        return context


class Refused(Exception):
    """etcd answered with an error. `code` is gRPC's, or -1 for an answer that is not etcd's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message + (_IF_FULL if "database space exceeded" in message else ""))
        self.code = code


def connect(endpoint: Endpoint, tls: ssl.SSLContext | None, timeout: float) -> Connection:
    """Opens a connection. Raises an `OSError` if that fails."""
    if tls is None:
        made = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout)
    else:
        made = http.client.HTTPSConnection(
            endpoint.host, endpoint.port, timeout=timeout, context=tls
        )
    try:
        made.connect()
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(made.sock)
    except BaseException:
        made.close()
        raise
    return Connection(made)


def _keep_alive(sock: socket.socket) -> None:
    """Makes a connection end soon after its server has lost its memory.

    A stream only reads. If the server's host loses power and is back within seconds, it answers
    every question on new connections, and knows nothing of this one: a probe makes it say so.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)


class Connection:
    """A connection for one request at a time. After any error but `Refused`, close it."""

    def __init__(self, http_connection: http.client.HTTPConnection) -> None:
        self._http = http_connection

    def close(self) -> None:
        self._http.close()

    def request(
        self, path: str, body: Json | None, headers: Mapping[str, str], limit: float
    ) -> Json:
        """One request and its answer, within `limit` seconds.

        Raises:
            Refused: etcd answered, with an error.
            OSError, http.client.HTTPException: no answer; the request may have been performed.
        """
        deadline = time.monotonic() + limit
        self._http.sock.settimeout(limit)
        data = None if body is None else json.dumps(body).encode()
        self._http.request("GET" if body is None else "POST", path, data, dict(headers))
        answer = self._http.getresponse()
        if answer.fp is None:
            raise http.client.HTTPException("an answer without contents")
        pieces = []
        while piece := answer.read1(2**20):
            pieces.append(piece)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the answer took too long")
            if self._http.sock is not None:
                self._http.sock.settimeout(left)
        answer.close()
        return parse(b"".join(pieces), answer.status)

    def stream(self, path: str, body: Json, headers: Mapping[str, str]) -> Stream:
        """Begins a request whose answer has no end; the connection belongs to the stream."""
        data = json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {self._http.host}:{self._http.port}",
            f"Content-Length: {len(data)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self._http.sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        return Stream(self._http)


class Stream:
    """The lines of an endless answer. A read that times out may be repeated, and loses nothing."""

    def __init__(self, http_connection: http.client.HTTPConnection) -> None:
        self._http = http_connection
        self._sock = http_connection.sock
        self._raw = bytearray()
        self._text = bytearray()
        self._status = 0

    def read(self, timeout: float) -> list[Json]:
        """The messages that arrived, after a wait for the first; none if `timeout` passes.

        Raises:
            Refused: etcd ended the stream with an error.
            OSError: the connection was lost.
        """
        self._sock.settimeout(max(timeout, 0.001))
        try:
            piece = self._sock.recv(2**18)
        except (TimeoutError, ssl.SSLWantReadError):
            return []
        if not piece:
            raise ConnectionError("the stream ended")
        self._raw += piece
        if not self._status:
            self._read_headers()
        if self._status:
            self._decode_chunks()
        *whole, rest = self._text.split(b"\n")
        if len(rest) > _LARGEST_LINE:
            raise ConnectionError("a line of the stream is too long")
        self._text = bytearray(rest)
        return [parse(bytes(line), self._status) for line in whole if line]

    def _read_headers(self) -> None:
        head, separator, rest = bytes(self._raw).partition(b"\r\n\r\n")
        if not separator:
            if len(self._raw) > 2**16:
                raise ConnectionError("the answer is not HTTP")
            return
        words = head.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
            raise ConnectionError("the answer is not HTTP")
        if b"transfer-encoding: chunked" not in head.lower():
            raise Refused(-1, f"it answered {head.splitlines()[0].decode(errors='replace')!r}")
        self._status = int(words[1])
        self._raw = bytearray(rest)

    def _decode_chunks(self) -> None:
        while (end := self._raw.find(b"\r\n")) >= 0:
            try:
                size = int(bytes(self._raw[:end]).split(b";")[0], 16)
            except ValueError:
                raise ConnectionError("the stream is not HTTP") from None
            if size == 0:
                if self._text and not self._text.endswith(b"\n"):
                    self._text += b"\n"  # an error is the last line, and has no end
                elif not self._text:
                    raise ConnectionError("the stream ended")
                return
            if len(self._raw) < end + 2 + size + 2:
                return
            self._text += self._raw[end + 2 : end + 2 + size]
            del self._raw[: end + 2 + size + 2]

    def shut_down(self) -> None:
        """Ends a `read` in another thread, with an error."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed by the other side

    def close(self) -> None:
        self._http.close()


def parse(text: bytes, status: int) -> Json:
    """The JSON object in an answer, unless it is an error."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise Refused(-1, f"it answered with HTTP status {status}: {text[:80]!r}")
    error = answer.get("error")
    if isinstance(error, dict):  # inside a stream
        raise Refused(int(error.get("grpc_code", 2)), str(error.get("message", "")))
    if error is not None or status != 200:
        raise Refused(int(answer.get("code", -1)), str(answer.get("message") or error))
    return answer


def diagnose(endpoint: Endpoint, security: Security, limit: float) -> str:
    """What is wrong with `endpoint`; empty if it is an etcd that answers."""
    try:
        version = _version(endpoint, security, limit)
    except ssl.SSLCertVerificationError as e:
        signers = "name the file of the certificates that sign it by cacert=FILE"
        advice = "renew it" if "expired" in e.verify_message else signers
        return f"the certificate of {endpoint} is not valid for it ({e.verify_message}): {advice}"
    except ssl.SSLError as e:
        if "CERTIFICATE_REQUIRED" in str(e) or "BAD_CERTIFICATE" in str(e):
            return f"{endpoint} asks for a client's certificate: name it by cert=FILE,key=FILE"
        if _speaks_tls(endpoint, limit):
            return f"{endpoint} refuses the TLS connection: {e.reason or e}"
        return _uses_no_tls(endpoint)
    except (OSError, http.client.HTTPException) as e:
        if not security.uses_tls and _speaks_tls(endpoint, limit):
            return _needs_tls(endpoint)
        if security.uses_tls and isinstance(e, ConnectionError):
            # The connection may end before the answer of a server without TLS is read.
            with contextlib.suppress(OSError, http.client.HTTPException):
                if isinstance(_version(endpoint, Security(), limit), dict):
                    return _uses_no_tls(endpoint)
        if security.uses_tls and security.cert == "" and isinstance(e, ConnectionError):
            return f"{endpoint} closes TLS connections ({_reason(e)}): it may need cert=,key="
        if isinstance(e, http.client.HTTPException):
            return f"{endpoint} answers, but not as etcd does ({_reason(e)})"
        return f"nothing answers at {endpoint} ({_reason(e)})"
    if not isinstance(version, dict) or not isinstance(version.get("etcdserver"), str):
        if not security.uses_tls and _speaks_tls(endpoint, limit):
            return _needs_tls(endpoint)
        return f"{endpoint} answers, but is not etcd"
    if _numbers(version["etcdserver"])[:2] < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return f"{endpoint} is etcd {version['etcdserver']}: {needed} or later is needed"
    return ""


def known_fault(endpoint: Endpoint, security: Security, limit: float) -> str:
    """What is known to disturb a job in this version of etcd; empty if nothing is."""
    try:
        version = str(_version(endpoint, security, limit)["etcdserver"])
    except (OSError, http.client.HTTPException, KeyError, TypeError):
        return ""  # it has answered `diagnose` before: it has gone
    numbers = _numbers(version)
    mended = _STALLS_MENDED.get(numbers[:2], 0)
    if numbers[2] >= mended:
        return ""
    return (
        f"{endpoint} is etcd {version}: when the disk of its leader stalls, hosts that live may "
        f"lose their leases, and end their workers; {numbers[0]}.{numbers[1]}.{mended} does not"
    )


def _numbers(version: str) -> tuple[int, int, int]:
    """As in `3.4.23`; of a version that is no number, very late ones."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        return 99, 0, 0
    return int(found[1]), int(found[2]), int(found[3] or 0)


def explain(refused: Refused, security: Security) -> str:
    """What to do about a request that etcd refused; empty if that is not known."""
    text = str(refused)
    if "user name is empty" in text:
        return (
            "it requires a user: name it by user=NAME, and give the password in the environment "
            "variable OUTLAST_ETCD_PASSWORD or in a file, by password_file=FILE"
        )
    if "authentication failed" in text:
        return f"it refused the password of user {security.user!r}"
    if "authentication is not enabled" in text:
        return f"it has no users: remove user={security.user}"
    if "permission denied" in text:
        return (
            f"user {security.user!r} lacks the permission: grant it read and write access to all "
            "keys that begin with /outlast/"
        )
    return ""


def _version(endpoint: Endpoint, security: Security, limit: float) -> Any:
    with contextlib.closing(connect(endpoint, security.context(), limit)) as connection:
        try:
            return connection.request("/version", None, {}, limit)
        except Refused:
            return None


def _speaks_tls(endpoint: Endpoint, limit: float) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only to see whether it answers as TLS does
    try:
        with (
            socket.create_connection((endpoint.host, endpoint.port), limit) as plain,
            context.wrap_socket(plain) as secure,
        ):
            return secure.version() is not None
    except OSError:
        return False


def _needs_tls(endpoint: Endpoint) -> str:
    return (
        f"{endpoint} uses TLS: name the file of the certificates that sign its certificate by "
        "cacert=FILE, or use those of the system by protocol=https"
    )


def _uses_no_tls(endpoint: Endpoint) -> str:
    return f"{endpoint} does not use TLS: remove cacert, cert, key and protocol=https"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()
