"""A job on many hosts: how its agents, one on each host, find each other and stay in agreement.

* `host_group`: the group of all hosts as the agent sees it. There are two: `replicated/`, of the
  agents themselves, and `etcd/`.
* `server/`: serves the store to the workers of this host.
* `job/`: which host has which place, when workers are restarted, how the job ends.
"""
