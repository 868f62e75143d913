"""The replicated store of many hosts: a consensus core without sockets, threads, files or a clock.

`node` is the entry: one `Node` per host, driven by the host service, which passes in messages and
the time, and sends what it takes from the outbox.

* `operations`: what the store can do, and what it answers. `hosts`: what a host says about itself.
* `messages`: the entries of the log, what nodes send each other, and the encoding.
* `table`: the keys, the chain, the hosts, and the answers that are kept for retries.
* `own_host`: the lease and the operations of this host.
* `quorum`: which voters decide together, and all durations. `voter`, `election`, `leader`: how they
  agree. `serving`: what a leader does for the hosts.
"""
