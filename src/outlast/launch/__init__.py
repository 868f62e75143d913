"""The launcher: `outlast run` starts a job's workers, keeps the survivors, replaces the dead.

Who is who::

    cli, commands/      the command line; nothing here imports torch before a job is started
    options -> job      what was typed -> what to do, checked
    agent               the one process that sees workers die and decides; single-threaded, and it
                        waits in one place (`loop`) for signals, output and timers
    decisions, backoff, outcome
                        the rules, pure: what a death leads to, how long to wait, what to say
    worker, output, environment, store
                        a worker process, its output, its variables, the store that it finds
    shim, warden, processes
                        why no process is left behind (see `processes`)
"""
