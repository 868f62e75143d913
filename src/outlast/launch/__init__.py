"""The launcher: `outlast run` starts a job's workers, keeps the survivors, replaces the dead.

| find | where |
|---|---|
| the command line; nothing there imports torch before a job is started | `cli`, `commands/` |
| the options of `outlast run`, and the checked job | `config/` |
| what follows from a death; replacements; the end of a job; its last lines | `agent/` |
| a worker process, its output, standby processes, reaping | `workers/` |
| a job on many hosts: the group of agents, their store, their decisions | `hosts/` |
| the only place where the launcher waits: signals, output, timers | `event_loop` |
| the environment variables of workers | `environment` |
"""
