"""The store server of a host: torch's TCP store protocol over the store of all hosts.

* `store_server`: the listener. `client_connection`: one client. `wire_protocol`: torch's requests.
* `combining`: operations of all clients become few. `upstream`: where these go.
* `host_keys`: the keys that stay on this host.
"""
