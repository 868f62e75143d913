"""The agents' own group (`group`), which needs no service besides them.

`service` is the thread; `joining`, `founding`, `past` and `record` bring it into the group, and
`membership` keeps it there. `messages`, `handshake`, `connection`, `peer_connections` and
`endpoints` are how agents talk, over TCP.
"""
