"""What is said about an endpoint that is of no use, and about requests that etcd refuses."""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from etcd_cluster import NET_S, Cluster, etcdctl
from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import (
    Endpoint,
    Refused,
    Security,
    diagnose,
    explain,
    known_fault,
)
from outlast.errors import StoreError
from procs import free_port

READ = ("/v3/kv/range", {"key": "L291dGxhc3Qv"})


@contextlib.contextmanager
def http_server(text: bytes) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Endpoint("127.0.0.1", server.server_port)
        server.shutdown()
        thread.join()


def test_nothing_answers() -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    said = diagnose(endpoint, Security(), NET_S)
    assert said == f"nothing answers at {endpoint} (Connection refused)"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1])
        said = diagnose(endpoint, Security(), 0.2)
        assert said == f"nothing answers at {endpoint} (no answer in time)"


def test_something_else_answers() -> None:
    with http_server(b"<html>hello") as endpoint:
        assert diagnose(endpoint, Security(), NET_S) == f"{endpoint} answers, but is not etcd"
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = Endpoint("127.0.0.1", other.getsockname()[1])

        def answer() -> None:
            for _ in range(2):
                with other.accept()[0] as connection:
                    connection.recv(4096)
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert "answers, but not as etcd does" in diagnose(endpoint, Security(), NET_S)
        thread.join()


def test_an_etcd_that_is_too_old() -> None:
    with http_server(b'{"etcdserver":"3.2.26","etcdcluster":"3.2.0"}') as endpoint:
        said = diagnose(endpoint, Security(), NET_S)
        assert said == f"{endpoint} is etcd 3.2.26: 3.4 or later is needed"


@pytest.mark.parametrize(
    ("version", "mended"),
    [
        ("3.4.23", "3.4.31 does not"),
        ("3.5.12", "3.5.13 does not"),
        *((each, "") for each in ("3.4.31", "3.5.13", "3.6.0", "4.0.0-alpha", "git")),
    ],
)
def test_a_version_whose_leaders_harm_leases(version: str, mended: str) -> None:
    with http_server(f'{{"etcdserver":"{version}"}}'.encode()) as endpoint:
        assert diagnose(endpoint, Security(), NET_S) == ""
        said = known_fault(endpoint, Security(), NET_S)
        assert said.endswith(mended)
        assert bool(said) == bool(mended)


def test_a_certificate_that_cannot_be_read(tmp_path: Path) -> None:
    missing = str(tmp_path / "ca.pem")
    with pytest.raises(StoreError, match=r"cannot be loaded \(.*ca.pem\): .*No such file"):
        EtcdClient([Endpoint("h", 1)], Security(cacert=missing))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The file of a certificate or key: `ca.pem`, `server.pem`, `server.key`, ..."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes", "-subj")
    openssl(*new, "/CN=ca", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl(*new, f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        sign = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key")
        openssl(*sign, "-CAcreateserial", "-days", "2", "-extfile", "names", "-out", f"{name}.pem")
    return lambda name: str(folder / name)


@pytest.fixture(scope="module")
def tls(certificates: Callable[[str], str]) -> Iterator[Cluster]:
    """An etcd with TLS."""
    options = ["--cert-file", certificates("server.pem"), "--key-file", certificates("server.key")]
    security = Security(cacert=certificates("ca.pem"))
    with Cluster(options=options) as cluster, contextlib.closing(cluster.client(security)):
        yield cluster


def test_a_server_without_tls_may_reset_the_connection_before_its_answer_is_read() -> None:
    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # it is shut down
            with connection:
                if connection.recv(1) == b"\x16":  # the begin of TLS
                    connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    continue
                text = b'{"etcdserver": "3.5.13"}'
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text))
                connection.sendall(text)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        said = diagnose(endpoint, Security(tls=True), NET_S)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert said.startswith(f"{endpoint} does not use TLS: remove cacert"), said


@pytest.mark.slow
def test_tls(tls: Cluster, etcd: Cluster, certificates: Callable[[str], str]) -> None:
    [endpoint] = tls.endpoints
    assert diagnose(endpoint, Security(cacert=certificates("ca.pem")), NET_S) == ""
    said = diagnose(endpoint, Security(), NET_S)
    assert said.startswith(f"{endpoint} uses TLS: name the file of the certificates")
    said = diagnose(endpoint, Security(tls=True), NET_S)
    assert said.startswith(f"the certificate of {endpoint} is not valid for it (unable")
    [plain] = etcd.endpoints
    said = diagnose(plain, Security(cacert=certificates("ca.pem")), NET_S)
    assert said.startswith(f"{plain} does not use TLS: remove cacert")


@pytest.mark.slow
def test_a_certificate_of_the_client(certificates: Callable[[str], str]) -> None:
    ca = certificates("ca.pem")
    options = ["--cert-file", certificates("server.pem"), "--key-file", certificates("server.key")]
    options += ["--client-cert-auth", "--trusted-ca-file", ca]
    good = Security(cacert=ca, cert=certificates("client.pem"), key=certificates("client.key"))
    with Cluster(options=options) as cluster, contextlib.closing(cluster.client(good)):
        [endpoint] = cluster.endpoints
        assert diagnose(endpoint, good, NET_S) == ""
        said = diagnose(endpoint, Security(cacert=ca), NET_S)
        assert "cert=" in said, said


@pytest.mark.slow
def test_users() -> None:
    with Cluster() as cluster:
        with contextlib.closing(cluster.client()):
            etcdctl(cluster, "user", "add", "root:secret")
            etcdctl(cluster, "role", "add", "root")
            etcdctl(cluster, "user", "grant-role", "root", "root")
            etcdctl(cluster, "user", "add", "guest:guest")
            etcdctl(cluster, "auth", "enable")

        def ask(security: Security) -> EtcdClient:
            client = EtcdClient(cluster.endpoints, security)
            with contextlib.closing(client):
                client.repeat(*READ, NET_S)
                # A token that etcd no longer knows is replaced.
                client._token = "unknown.1"
                client.repeat(*READ, NET_S)
            return client

        ask(Security(user="root", password="secret"))
        for security, expected in [
            (Security(), "it requires a user: name it by user=NAME"),
            (Security(user="root", password="wrong"), "it refused the password of user 'root'"),
            (Security(user="guest", password="guest"), "user 'guest' lacks the permission"),
        ]:
            with pytest.raises(Refused) as refused:
                ask(security)
            assert explain(refused.value, security).startswith(expected), refused.value


def test_a_user_of_an_etcd_without_users(etcd: Cluster) -> None:
    security = Security(user="me", password="x")
    with (
        contextlib.closing(EtcdClient(etcd.endpoints, security)) as client,
        pytest.raises(Refused) as refused,
    ):
        client.repeat(*READ, NET_S)
    assert explain(refused.value, security) == "it has no users: remove user=me"
