"""Training jobs that outlast their faults.

`outlast.inprocess` restarts a function in place, `outlast run` keeps a job's survivors and replaces
its dead, `outlast.chaos` injects faults, `outlast.events` tells what happened.
"""
