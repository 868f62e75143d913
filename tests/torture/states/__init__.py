"""States of any shape, saved and restored: the same bits come back, or an error names the entry.

A case is made from its seed alone: what is saved, and into what it is restored, which is often a
changed program. What it consists of is in `tensors` and `values`; `cases` puts it together, and
`changes` changes it. Long-lived processes save and restore (`sides`), `judge` says what is wrong,
`trial` runs cases and shrinks those that are wrong. `programs` are jobs with optimizers, which must
resume whatever plain torch resumes.

    python -m torture.states --seed 17              # the one case
    python -m torture.states --seed 0 --cases 1000
"""
