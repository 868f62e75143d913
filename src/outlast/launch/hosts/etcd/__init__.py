"""The host group over etcd: `lease.py`, `membership.py`, `admission.py`, and `upstream.py`, which
performs the operations of the workers. `launch/hosts/etcd_group.py` is made of them.
"""
