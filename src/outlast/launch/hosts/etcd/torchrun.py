"""A rendezvous of plain torchrun on etcd v3: `torchrun --rdzv-backend outlast-etcd`.

torch's own etcd rendezvous speaks the API of etcd v2, which etcd 3.6 has removed. This is torch's
dynamic rendezvous (its states, timeouts and options) with its state in one key of etcd v3, which is
only ever replaced by a comparison with the revision that was read. torchrun finds it by the entry
point `torchrun.handlers`; outlast need not be imported by the script.

    torchrun --rdzv-backend outlast-etcd --rdzv-endpoint h1:2379,h2:2379,h3:2379 --rdzv-id JOB
        --nnodes 2:4 --nproc-per-node 8 train.py

`--rdzv-conf` takes what `outlast run --rdzv-backend etcd` takes (cacert, cert, key, user,
password_file, protocol) besides torch's own. The store of torchrun's agents is in etcd too, so it
survives the loss of any host. Choose another `--rdzv-id` for each job: its keys stay in etcd
under `/outlast/torchrun%2FJOB/`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from typing import Any, cast

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Endpoint, Refused, diagnose, explain
from outlast.coordination.stores.etcd.store import LIMIT_S, EtcdStore
from outlast.errors import LaunchError, StoreError
from outlast.launch.hosts.etcd.group import security_of
from outlast.launch.hosts.etcd.membership import top_of
from outlast.launch.hosts.etcd.serving import ServerThread

NAME = "outlast-etcd"


def create(params: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous of a torchrun agent; errors name the endpoint, and what is wrong with it."""
    with contextlib.ExitStack() as stack:
        try:
            client = _connect(params)
            stack.callback(client.close)
            root = top_of(f"torchrun/{params.run_id}")
            store = EtcdStore(client, root.decode(), secrets.token_hex(8))
            stack.callback(store.close)
            # torch's agents want a store in C++: its client talks to a server in this process.
            server = ServerThread(lambda: store)
            stack.callback(server.close)
            local = TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        except (LaunchError, StoreError) as e:
            raise RendezvousConnectionError(f"--rdzv-endpoint {params.endpoint}: {e}") from e
        made = create_handler(local, EtcdBackend(client, root), params)
        return cast(RendezvousHandler, _Handler(made, stack.pop_all()))


def _connect(params: RendezvousParameters) -> EtcdClient:
    conf: Mapping[str, Any] = params.config
    security = security_of({name: str(value) for name, value in conf.items()})
    try:
        named = [parse_rendezvous_endpoint(e.strip(), 2379) for e in params.endpoint.split(",")]
    except ValueError as e:
        raise LaunchError(str(e)) from e
    endpoints = [Endpoint(*each) for each in named]
    problems = [diagnose(endpoint, security, 5.0) for endpoint in endpoints]
    if all(problems):
        raise LaunchError("; ".join(problems))
    client = EtcdClient(endpoints, security)
    try:
        client.repeat("/v3/kv/range", layout.range_of(b"/outlast/", count_only=True), LIMIT_S)
    except Refused as e:
        client.close()
        raise LaunchError(explain(e, security) or f"etcd refused a request: {e}") from e
    return client


class EtcdBackend(RendezvousBackend):
    """Holds the state of torch's rendezvous in a key of etcd.

    The token of a state is the revision at which it was written. A second key has the name of the
    last write; so a write whose answer was lost is found to have gone through.
    """

    def __init__(self, client: EtcdClient, root: bytes) -> None:
        self._client = client
        self._state, self._writer = root + b"state", root + b"writer"

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state and its token; `None` if there is none yet."""
        found = layout.entries(self._call("/v3/kv/range", layout.range_of(self._state)))
        return (found[0].value, found[0].modified) if found else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replaces the state that has this token (`None`: if there is none). Returns the state
        afterwards, its token, and whether it was replaced.
        """
        if token is not None and not isinstance(token, int):
            held = self.get_state()
            return None if held is None else (*held, False)
        name = secrets.token_hex(8).encode()
        body = layout.transaction(
            [layout.modified(self._state, token or 0)],
            [layout.put(self._state, state), layout.put(self._writer, name)],
            [layout.get(self._state), layout.get(self._writer)],
        )
        answer = self._call("/v3/kv/txn", body)
        if answer.get("succeeded"):
            return state, layout.revision_of(answer), True
        found, writer = (layout.entries(response) for response in answer["responses"])
        if not found:
            return None
        mine = bool(writer) and writer[0].value == name
        return found[0].value, found[0].modified, mine

    def _call(self, path: str, body: layout.Json) -> layout.Json:
        try:
            return self._client.repeat(path, body, LIMIT_S)
        except (StoreError, Refused) as e:
            raise RendezvousConnectionError(f"the rendezvous in etcd failed: {e}") from e


class _Handler:
    """torch's dynamic rendezvous, whose rounds each have a master of their own.

    torch (2.4 to 2.13) remembers the address of the first master, even after the host of that
    master was lost: all later rounds would wait for it.
    """

    def __init__(self, dynamic: DynamicRendezvousHandler, cleanup: contextlib.ExitStack) -> None:
        self._dynamic, self._cleanup = dynamic, cleanup

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dynamic, name)

    def next_rendezvous(self) -> RendezvousInfo:
        self._dynamic._bootstrap_store_info = None
        self._dynamic._shared_tcp_store_server = None
        return self._dynamic.next_rendezvous()

    def shutdown(self) -> bool:
        done = self._dynamic.shutdown()
        self._cleanup.close()
        return done
