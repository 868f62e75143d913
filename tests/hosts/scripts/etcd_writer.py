"""Appends and adds to the store on etcd, from one host: `etcd_writer.py ENDPOINTS COUNT`."""

from __future__ import annotations

import socket
import sys

from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Endpoint, Security
from outlast.coordination.stores.etcd.store import EtcdStore

endpoints = [
    Endpoint(name, int(port)) for name, port in (e.split(":") for e in sys.argv[1].split(","))
]
name = socket.gethostname()
client = EtcdClient(endpoints, Security())
store = EtcdStore(client, "test/", name)
sums = []
for number in range(int(sys.argv[2])):
    store.append("log", f"{name}:{number};".encode())
    sums.append(store.add("sum", 1))
    print(f"wrote {number}", flush=True)
winner = store.claim("winner", name.encode())
if store.add("count", 1) == 2:
    store.put("over", b"1")
store.wait_for("over", None)
log = (store.read("log") or b"").decode()
print(f"winner {winner.decode()} sums {sums} log {log}", flush=True)
store.close()
client.close()
