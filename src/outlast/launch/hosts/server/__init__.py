"""The store server of a host: torch's TCP store protocol over the store of all hosts.

`store_server` listens, `client_connection` is one client, `wire_protocol` torch's requests.
`combining` makes few operations of those of all clients. `loop_store` is the agent's way to it.
"""
