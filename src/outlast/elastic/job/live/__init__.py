"""Continues after a fault from the state that the surviving ranks have, without a checkpoint.

After each step a `Job` notes a *live point* (`recorder`, `writes`). At the end of the iteration the
last one is kept (`frozen`). After a restart in place, the ranks say which step their tensors are
at. All ranks continue from the newest step of which every part is left (`choice`), and a rank that
lacks it receives it from others (`transfer`).

What belongs to one rank alone, such as its random generators, is also kept in shared memory
(`own_state`) that survives a kill of the process: the replacement inherits it.

**The critical section.** From the moment when an optimizer begins a step until the next `Job.step`,
the tensors belong to no step. A rank that fails there has no point to offer; its peers do.

**Which steps are left.** With replicas, no rank completes step S+1 before every rank has computed
its gradients for S+1. So each rank is at S, at S+1, or in the critical section between them, and
the tensors of S+1 are available if one rank has completed it. The own state of each rank at S+1 is
needed too. A rank that has not completed S+1 has noted it *early*: when the gradient of one
parameter was accumulated. DDP sends that gradient only afterwards, so no rank can complete S+1
before. The early state is used only if those who completed S+1 found theirs unchanged at
`Job.step`, after as many backward passes: all ranks run the same program.

What remains: a rank that is killed between its last collective of the step and the optimizer's step
has no early state if its parameters are sharded, if `Job` saves a loader state or parts for each
rank, or if the hooked parameter was not used. With shards and no replicas, the ranks cannot
continue if some have completed S+1 and another has not. Then a checkpoint is loaded.

**A fault during a restore.** The points of the iteration before stay until all ranks have loaded
the state. A state is identified by its step and by the *branch* on which the step was
made; each restore begins a new branch. So ranks that have seen the end of a restore agree with
those that have not on what was restored, and abandoned steps never mix with those made anew.
"""
