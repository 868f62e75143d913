"""The agents' own group, which needs no service besides them: founding, joining, leases.

* `group`: the host group that is made of them.
* `messages`, `connection`, `peer_connections`: how agents talk, over TCP.
* `endpoints`: which of the addresses on the command line are this host's, and how others reach it.
* `founding`: which endpoint founds the group. `joining`: how a host gets in.
* `admission`: who is refused, and why.
* `service`: the thread that drives this host's replica of the store. `group_store`: the store, for
  other threads.
"""
