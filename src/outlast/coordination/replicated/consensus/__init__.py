"""Agreement among the voters: one log, one leader at a time, changes of who votes.

* `log`: what they have agreed on.
* `voter`, `election`, `leader`: what each replica keeps, how a leader is found, and its part.
* `serving`, `host_leases`: what a leader does for the hosts.
"""
