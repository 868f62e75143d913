"""Continues after a fault from the state that the surviving ranks have, without a checkpoint.

After each step a `Job` notes a *live point* (`recorder`, `writes`), and what belongs to one rank
alone in memory that survives a kill (`own_state`). At the end of the iteration the last point is
kept (`frozen`). After a restart in place, all ranks continue from the newest step of which every
part is left (`choice`), and a rank that lacks it receives it from others (`transfer`).
docs/architecture.md says why ("Continuing from the survivors").

What remains: a rank that is killed between its last collective of the step and the optimizer's step
has no early state if its parameters are sharded, if `Job` saves a loader state or parts for each
rank, or if the hooked parameter was not used. With shards and no replicas, the ranks cannot
continue if some have completed a step and another has not. Then a checkpoint is loaded.
"""
