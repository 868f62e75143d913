"""The host group over etcd: `group`, of `lease`, `membership`, and `serving` for the workers."""
