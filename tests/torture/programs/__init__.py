"""Training programs as other people write them, put together from parts, through faults and stops.

A program is one choice of each part (`parts`): how it loops, where it evaluates, what it logs, how
it leaves. The programs of a run cover all pairs of choices (`covering`). Each is written to a file
(`source`), and run by `outlast run` (`running`): undisturbed, then through exceptions, kills and
stops in each of its phases. It must end with the same weights, losses, samples, evaluations, rows
and best model, or be refused with a message that says why (`compare`, `trial`).
"""
