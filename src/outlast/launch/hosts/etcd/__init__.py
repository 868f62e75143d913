"""The host group over etcd: `group.py`, made of `lease.py`, `membership.py`, `admission.py`, and
`upstream.py`, which performs the operations of the workers.
"""
