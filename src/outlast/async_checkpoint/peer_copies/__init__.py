"""Copies of snapshots in the memory of other hosts: `Checkpointer(..., replicas=1)`."""
