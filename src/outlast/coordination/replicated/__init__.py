"""The replicated store of many hosts: a consensus core without sockets, threads, files or a clock.

`replica` is the entry: one `Replica` per host, driven by the host service, which passes in messages
and the time, and sends what it takes from the outbox.

* `operations`: what the store can do, and what it answers.
* `hosts`: what a host says about itself. `timing`: all durations, derived from one.
* `messages`: what replicas send each other, and its encoding.
* `table`: the keys, the hosts, and the answers that are kept for retries.
* `requests`, `own_host`: the operations of this host, and its lease.
* `quorum`, `entries`: which voters decide, and about what.
* `consensus/`: the agreement among the voters.
"""
