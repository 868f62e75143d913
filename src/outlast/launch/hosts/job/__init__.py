"""What the agents of a job decide together, and what each does about it.

`run_job` is this host's part, from joining to the end, and `many_hosts` what its agent asks.
`decider` has the decisions, as pure functions; `leading` asks it on the host that leads. `links`
finds a broken link between two hosts. `job_log` has what hosts report besides.
"""
