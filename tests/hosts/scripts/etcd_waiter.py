"""Waits for one key of the store on etcd, or puts it: `etcd_waiter.py ENDPOINTS wait|put`."""

from __future__ import annotations

import socket
import sys
import threading

from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Endpoint, Security
from outlast.coordination.stores.etcd.store import EtcdStore

named = [endpoint.split(":") for endpoint in sys.argv[1].split(",")]
client = EtcdClient([Endpoint(name, int(port)) for name, port in named], Security())
store = EtcdStore(client, "test/", f"{socket.gethostname()} {sys.argv[2]}")
if sys.argv[2] == "put":
    store.put("key", b"value")
else:
    waits = [threading.Thread(target=store.wait_for, args=(key, None)) for key in ("first", "key")]
    for wait in waits:
        wait.start()
    store.put("first", b"")
    waits[0].join()  # the watch works
    print("waiting", flush=True)
    while waits[1].is_alive():
        store.read("other")  # so that the client learns of a lost member by its requests too
        waits[1].join(0.1)
    print("found", flush=True)
store.close()
client.close()
