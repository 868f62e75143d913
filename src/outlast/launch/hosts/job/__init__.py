"""What the agents of a job decide together, through the store, and what each does about it.

* `run_job`: this host's part, from joining to the end. `many_hosts`: what its agent asks.
* `decider`, `job_plan`, `places`: the decisions, as pure functions. `leading`: the host that makes
  them. `plan_watcher`: how the others learn of them.
* `links`: a broken link between two hosts, found, and judged.
* `job_log`, `notices`, `placements`, `workers_store`: what is written where.
"""
