"""The deterministic simulation of hosts: the replicated store, on a network and clocks that fail.

The consensus core (`outlast.coordination.replicated`) does no input or output. Here a few hosts run
it in one process: the seed decides when each message arrives, if at all, how fast each clock runs,
which hosts die, stop, are cut off, leave or come, and what they ask of the store. A failure prints
its seed; to replay it, with `PYTHONPATH=tests`::

    from simulation.hosts.simulate import simulate_hosts

    simulate_hosts(4711)

`simulation.hosts.founding` does the same for launchers that found and join groups.
"""
