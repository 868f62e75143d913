"""The round of a save, in every order of its store operations.

Each thread of each rank (`simulated_rank.py`) is the code that runs in a job, on a store that
answers from a list and stops the code at the first operation that has no answer (`explorer.py`). So
the next operation of a thread is a function of the answers that it has had, and the state of a run
is the store's table with one such list for each thread. The explorer visits all states, or follows
a path that a seed chooses. A broken invariant is raised with the path to it.
"""
