"""The health of this host: `host_check` makes the checks in a process of their own, those that need
torch by `device_checks`, before this host asks for a place in the job.
"""
