"""The deterministic simulation: the real membership protocol, in one process, in any interleaving.

The state machine of a rank (`inprocess/recovery/state_machine.py`) and the protocol
(`coordination/membership.py`) are coroutines that yield store operations. A seeded scheduler runs
N members, one operation at a time, on a store in memory and a fake clock. The seed decides the
interleaving, every death, fault, joiner and delay. A failure prints its seed; to replay it, with
`PYTHONPATH=tests`::

    from simulation.fault_budget import Schedule
    from simulation.simulate import simulate

    simulate(4711)                       # the schedule that belongs to the seed
    simulate(4711, Schedule(members=3))  # or a custom one

The same seed and schedule give the same run, step by step, as long as the code is the same.
"""
