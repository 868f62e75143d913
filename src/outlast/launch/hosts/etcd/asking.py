"""`outlast drain` in a job with `--rdzv-backend etcd`: writes to the chain, as no host of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Endpoint, Refused
from outlast.errors import LaunchError
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.hosts.etcd.group import security_of
from outlast.launch.hosts.etcd.membership import append, current_root, followed
from outlast.launch.hosts.named_hosts import NoSuchHost, asked_of


def ask_etcd(
    spec: HostsSpec, run_id: str, hosts: Sequence[str], rank: int, reason: str
) -> list[str]:
    """Has these hosts leave, or a rank move if it is not -1; returns their names. A `LaunchError`
    if there are no such ones.
    """
    request = secrets.token_hex(6)
    client = EtcdClient([Endpoint(*each) for each in spec.endpoints], security_of(spec.conf))
    try:
        root = current_root(client, run_id)
        if root is None:
            raise LaunchError(f"there is no run {run_id!r} in etcd at {client.where}")
        while True:
            found = followed(client, root)
            asked = asked_of(found.chain.plan, hosts, rank, reason, request)
            new = [each for each in asked.values() if found.chain.plan.if_new(each) is not None]
            if not new:
                return list(asked)
            append(client, root, found, new)
    except NoSuchHost as e:
        raise LaunchError(str(e)) from e
    except Refused as e:
        raise LaunchError(f"etcd at {client.where} refused a request: {e}") from e
    finally:
        client.close()
