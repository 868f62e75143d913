"""A campaign of faults: `outlast chaos campaign` shows that a training survives all of them.

A campaign runs a real training in rounds: its own, or the user's script. Each round is a job of
`outlast run` with a plan of faults, from a seed: kinds, phases and ranks, and what happens to the
launcher. The result must be that of an undisturbed run, bit by bit; and no process, file or
descriptor may be left over.

| find | where |
|---|---|
| the loop over the rounds | `campaign.py` |
| the plans of the rounds, from a seed | `generate.py`, `plan.py` |
| the training, and its result | `programs.py`; the own one: `training.py` |
| one round, and what it must not leave; its job | `round.py`; `job.py` |
| what each fault has cost | `figures.py` |
| hosts in network namespaces | `network.py` |
| the results and the table | `results.py` |
"""
