"""A job on many hosts: how its agents, one on each host, find each other and stay in agreement.

`host_group` is the group as an agent sees it, with two implementations, `replicated/` and `etcd/`;
`plan` the state of the job, computed from the group's chain; `job/` what agents do about it;
`server/` the store that the workers of this host use.
"""
