"""How to connect to etcd, from the settings of the command line and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outlast.coordination.stores.etcd.connection import Security
from outlast.errors import LaunchError
from outlast.launch.environment import etcd_password


def security_of(conf: Mapping[str, str]) -> Security:
    """How to connect, from the settings of `--rdzv-conf` and the environment.

    Raises:
        LaunchError: naming the setting that is wrong.
    """
    if "password" in conf:
        raise LaunchError(
            "--rdzv-conf password: other users could read it from the command line; use the "
            "environment variable OUTLAST_ETCD_PASSWORD, or a file, by password_file=FILE"
        )
    protocol = conf.get("protocol", "")
    if protocol not in ("", "http", "https"):
        raise LaunchError(f"--rdzv-conf protocol={protocol}: expected http or https")
    if bool(conf.get("cert")) != bool(conf.get("key")):
        raise LaunchError("--rdzv-conf: cert and key are only of use together")
    if protocol == "http" and (conf.get("cacert") or conf.get("cert")):
        raise LaunchError("--rdzv-conf protocol=http conflicts with cacert and cert, for TLS")
    password = etcd_password()
    if file := conf.get("password_file", ""):
        try:
            password = Path(file).read_text().strip()
        except OSError as e:
            raise LaunchError(f"--rdzv-conf password_file={file}: {e.strerror}") from e
    user = conf.get("user", "")
    if user and not password:
        raise LaunchError(
            f"--rdzv-conf user={user}: no password; set the environment variable "
            "OUTLAST_ETCD_PASSWORD, or name a file that holds it by password_file=FILE"
        )
    return Security(
        cacert=conf.get("cacert", ""),
        cert=conf.get("cert", ""),
        key=conf.get("key", ""),
        user=user,
        password=password,
        tls=protocol == "https",
    )
