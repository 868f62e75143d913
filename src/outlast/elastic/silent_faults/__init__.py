"""Faults that raise no error: parameters that differ between replicas, ranks that are slow.

`ReplicaCheck` compares the parameters of the ranks that hold the same ones, `StragglerCheck` their
step times. Neither uses a collective or waits for another rank: each rank publishes records through
the store of the process group from a background thread, rank 0 compares them there, and the other
ranks read what it found (`exchange.py`).
"""
