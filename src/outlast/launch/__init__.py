"""The launcher: `outlast run` starts a job's workers, keeps the survivors, replaces the dead.

Contents::

    cli, commands/      the command line; nothing there imports torch before a job is started
    config/             the options of `outlast run`, and the checked job specification
    agent/              the process that watches the workers: `decisions` (what follows from a
                        death), `replacement` (of a dead worker), `shutdown` (on SIGTERM, at the
                        end), `death_log`, `last_lines`, `early_ends` (before the function)
    hosts/              a job on many hosts: the group of agents, their store, the decisions that
                        concern all hosts (`decider`, `job_plan`) and how this agent takes part in
                        them (`many_hosts`)
    workers/            a worker process, how it is started, the group of all workers; standby
                        processes, which take the place of a dead worker
    output/             the output of the workers and the launcher's console
    processes/          reaping, ending helpers, killing orphans of a killed launcher
    event_loop          the only place where the launcher waits: signals, output, timers
    environment         the environment variables of workers
"""
