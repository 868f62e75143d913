"""Why an endpoint is of no use as etcd, and what to do about it, in one sentence."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from typing import Any

from outlast.coordination.stores.etcd.connection import Endpoint, Refused, Security, connect

OLDEST = (3, 4)
"""The first version of etcd whose gateway serves the paths that are used here."""


def diagnose(endpoint: Endpoint, security: Security, limit: float) -> str:
    """What is wrong with `endpoint`; empty if it is an etcd that answers."""
    try:
        version = _version(endpoint, security, limit)
    except ssl.SSLCertVerificationError as e:
        return (
            f"the certificate of {endpoint} is not valid for it ({e.verify_message}): name the "
            "file of the certificates that sign it by cacert=FILE"
        )
    except ssl.SSLError as e:
        if "CERTIFICATE_REQUIRED" in str(e) or "BAD_CERTIFICATE" in str(e):
            return f"{endpoint} asks for a client's certificate: name it by cert=FILE,key=FILE"
        if _speaks_tls(endpoint, limit):
            return f"{endpoint} refuses the TLS connection: {e.reason or e}"
        return f"{endpoint} does not use TLS: remove cacert, cert, key and protocol=https"
    except (OSError, http.client.HTTPException) as e:
        if not security.uses_tls and _speaks_tls(endpoint, limit):
            return _needs_tls(endpoint)
        if security.uses_tls and security.cert == "" and isinstance(e, ConnectionError):
            return f"{endpoint} closes TLS connections ({_reason(e)}): it may need cert=,key="
        if isinstance(e, http.client.HTTPException):
            return f"{endpoint} answers, but not as etcd does ({_reason(e)})"
        return f"nothing answers at {endpoint} ({_reason(e)})"
    if not isinstance(version, dict) or not isinstance(version.get("etcdserver"), str):
        if not security.uses_tls and _speaks_tls(endpoint, limit):
            return _needs_tls(endpoint)
        return f"{endpoint} answers, but is not etcd"
    numbers = version["etcdserver"].split(".")[:2]
    if all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return f"{endpoint} is etcd {version['etcdserver']}: {needed} or later is needed"
    return ""


def explain(refused: Refused, security: Security) -> str:
    """What to do about a request that etcd refused; empty if that is not known."""
    said = str(refused)
    if "user name is empty" in said:
        return (
            "it requires a user: name it by user=NAME, and give the password in the environment "
            "variable OUTLAST_ETCD_PASSWORD or in a file, by password_file=FILE"
        )
    if "authentication failed" in said:
        return f"it refused the password of user {security.user!r}"
    if "authentication is not enabled" in said:
        return f"it has no users: remove user={security.user}"
    if "permission denied" in said:
        return (
            f"user {security.user!r} lacks the permission: grant it read and write access to all "
            "keys that begin with /outlast/"
        )
    if "database space exceeded" in said:
        return "its database is full: compact and defragment it, then disarm its alarm"
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


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    strerror = getattr(error, "strerror", None)
    return str(strerror or str(error) or type(error).__name__).strip()
