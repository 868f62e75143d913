"""The store on etcd v3, by the JSON gateway that every member serves beside gRPC.

`operations.py` holds the operations as coroutines without I/O, `layout.py` the keys in etcd,
`client.py` the connections, `watch.py` the waits, `store.py` the `Store` made of them.

No published client is used. etcd3gw (2.7) and etcd3-py (0.1.6, of 2019) speak the same gateway, but
know one endpoint: a member that dies or hangs takes the client with it. aetcd (1.0) and etcd3
(0.12, of 2020) bring grpcio with protobuf, etcd-client-py (0.5) a compiled Rust extension. None of
them tells a request that was refused from one whose answer was lost, on which exactly-once
operations rest. Six requests and one stream are needed here, which `http.client` carries.
"""
