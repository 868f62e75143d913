"""A campaign of faults: `outlast chaos campaign` shows that a training survives all of them.

A campaign runs a real training in rounds: its own, or the user's script. Each round is a job of
`outlast run` with a plan of faults, from a seed: kinds, phases and ranks, and what happens to the
launcher. The result must be that of an undisturbed run, bit by bit; and no process, file or
descriptor may be left over.

| find | where |
|---|---|
| the loop over the rounds | `campaign.py` |
| the plans of the rounds, from a seed | `generate.py`, `plan.py` |
| the own training, and what it records | `training.py`, `records.py` |
| several rounds at a time | `side_by_side.py` |
| one round: its program, what it must not show, hosts in network namespaces | `rounds/` |
| the shortest plan that fails | `shrink.py` |
| the results and the table | `results.py`, `output.py` |
"""
